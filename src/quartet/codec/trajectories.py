"""The entries of the rollout stream: trajectories as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from quartet.codec.messages import from_message, to_message
from quartet.codec.tensors import floats_from_proto, ints_from_proto
from quartet.contract.trajectory import NO_LOG_PROBS, Branch, Segment, Trajectory
from quartet.errors import InvalidRequest
from quartet.v1 import trajectory_pb2

MAX_DETAIL_CHARACTERS = 1024
"""Maximum length of the cause of a failure. Longer ones are cut."""


def trajectory_to_bytes(trajectory: Trajectory) -> bytes:
    """Serialise a trajectory as the rollout stream stores it."""
    detail = trajectory.detail[:MAX_DETAIL_CHARACTERS]
    message = to_message(trajectory_pb2.Trajectory, trajectory, detail=detail)
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
    )


def printable(detail: str) -> str:
    """Return the cause of a failure as a printable line of limited length."""
    return "".join(each if each.isprintable() else " " for each in detail[:MAX_DETAIL_CHARACTERS])


def _segments(messages: Sequence[trajectory_pb2.Segment], path: str) -> tuple[Segment, ...]:
    return tuple(segment_from_proto(entry, f"{path}.segments[{index}]") for index, entry in enumerate(messages))


def segment_from_proto(message: trajectory_pb2.Segment, path: str) -> Segment:
    """Convert and validate a segment. ``path`` names it in the InvalidRequest that this raises."""
    token_ids, log_probs = ints_from_proto(message.token_ids, f"{path}.token_ids"), NO_LOG_PROBS
    if message.HasField("log_probs"):
        log_probs = floats_from_proto(message.log_probs, f"{path}.log_probs", len(token_ids))
    return from_message(Segment, message, path, token_ids=token_ids, log_probs=log_probs)
