"""The entries of the rollout stream: trajectories as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from quartet.codec.messages import from_message, to_message
from quartet.codec.tensors import floats_from_proto, ints_from_proto
from quartet.contract.logged_values import problem_of
from quartet.contract.trajectory import NO_LOG_PROBS, Branch, Segment, Trajectory
from quartet.errors import InvalidRequest
from quartet.v1 import trajectory_pb2

MAX_DETAIL_CHARACTERS = 1024
"""Maximum length of the cause of a failure. Longer ones are cut."""


def trajectory_to_bytes(trajectory: Trajectory) -> bytes:
    """Serialise a trajectory as the rollout stream stores it."""
    detail = trajectory.detail[:MAX_DETAIL_CHARACTERS]
    logged = logged_to_json(trajectory.logged) if trajectory.logged else ""
    message = to_message(trajectory_pb2.Trajectory, trajectory, detail=detail, logged=logged)
    for segment in (*message.segments, *(each for branch in message.further_branches for each in branch.segments)):
        if not segment.log_probs.data:
            segment.ClearField("log_probs")
    return message.SerializeToString()


def trajectory_from_bytes(data: bytes) -> Trajectory:
    """Parse the result of ``trajectory_to_bytes``. Raises InvalidRequest."""
    message = trajectory_pb2.Trajectory()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequest("trajectory: not a quartet.v1.Trajectory message") from None
    branches = tuple(
        from_message(Branch, branch, path, segments=_segments(branch.segments, path))
        for index, branch in enumerate(message.further_branches)
        for path in [f"trajectory.further_branches[{index}]"]
    )
    return from_message(
        Trajectory,
        message,
        "trajectory",
        segments=_segments(message.segments, "trajectory"),
        further_branches=branches,
        detail=printable(message.detail),
        logged=logged_from_json(message.logged, "trajectory.logged") if message.logged else {},
    )


def printable(detail: str) -> str:
    """Return the cause of a failure as a printable line of limited length."""
    return "".join(each if each.isprintable() else " " for each in detail[:MAX_DETAIL_CHARACTERS])


def logged_to_json(values: Mapping[str, Any]) -> str:
    """Return what was logged for a response as JSON."""
    return json.dumps(dict(values), sort_keys=True, allow_nan=False)


def logged_from_json(text: str, name: str) -> dict[str, Any]:
    """Return what was logged for a response. Raises InvalidRequest."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or (problem := problem_of(values)) is not None:
        reason = problem if isinstance(values, dict) else "not a JSON object"
        raise InvalidRequest(f"{name}: {reason}")
    return values


def _segments(messages: Sequence[trajectory_pb2.Segment], path: str) -> tuple[Segment, ...]:
    return tuple(segment_from_proto(entry, f"{path}.segments[{index}]") for index, entry in enumerate(messages))


def segment_from_proto(message: trajectory_pb2.Segment, path: str) -> Segment:
    """Convert and validate a segment. ``path`` names it in the InvalidRequest that this raises."""
    token_ids, log_probs = ints_from_proto(message.token_ids, f"{path}.token_ids"), NO_LOG_PROBS
    if message.HasField("log_probs"):
        log_probs = floats_from_proto(message.log_probs, f"{path}.log_probs", len(token_ids))
    return from_message(Segment, message, path, token_ids=token_ids, log_probs=log_probs)
