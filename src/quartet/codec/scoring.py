"""Messages of Score and of the reference's LogProbs."""

from __future__ import annotations

import math

from quartet.codec.messages import from_message, to_message
from quartet.codec.tensors import floats_from_proto
from quartet.codec.trajectories import MAX_DETAIL_CHARACTERS, logged_from_json, logged_to_json, printable
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.errors import InvalidRequest
from quartet.v1 import reward_pb2


def score_request_from_proto(message: reward_pb2.ScoreRequest) -> tuple[TokenBatch, list[str], dict[str, float]]:
    """Return the sequences, the fields of their prompts, and the weights of an ensemble's parts. Raises InvalidRequest."""
    weights = dict(message.weights)
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise InvalidRequest(f"weights: {name!r} is {weight:g}, expected a finite number")
    return from_message(TokenBatch, message.batch, "batch", updates=message.updates), list(message.fields), weights


def scores_to_proto(scores: Scores) -> reward_pb2.ScoreResponse:
    """Convert scores."""
    return to_message(
        reward_pb2.ScoreResponse,
        scores=scores.total,
        parts=scores.parts,
        outcomes=scores.outcomes,
        details=[detail[:MAX_DETAIL_CHARACTERS] for detail in scores.details],
        logged=list(map(logged_to_json, scores.logged)),
        cured_faults=scores.cured_faults,
    )


def scores_from_proto(message: reward_pb2.ScoreResponse, sequences: int) -> Scores:
    """Convert and validate the scores of ``sequences`` sequences. Raises InvalidRequest.

    A NaN without the outcome of a failure is refused, and a number with one.
    """
    for name in ("outcomes", "details", "logged"):
        if (count := len(getattr(message, name))) not in (0, sequences):
            raise InvalidRequest(f"{name}: expected none, or {sequences} elements, got {count}")
    return from_message(
        Scores,
        message,
        total=floats_from_proto(message.scores, "scores", sequences, finite=False),
        parts={
            name: floats_from_proto(values, f"parts.{name}", sequences, finite=False)
            for name, values in message.parts.items()
        },
        details=tuple(map(printable, message.details)),
        logged=tuple(logged_from_json(text, f"logged[{index}]") for index, text in enumerate(message.logged)),
    )
