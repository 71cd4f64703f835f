"""What the reward service answers."""

from __future__ import annotations

from quartet.codec.tensors import floats_from_proto, tensor_to_proto
from quartet.types import Scores
from quartet.v1 import reward_pb2


def scores_to_proto(scores: Scores) -> reward_pb2.ScoreResponse:
    """Scores to their message."""
    parts = {name: tensor_to_proto(values) for name, values in scores.parts.items()}
    return reward_pb2.ScoreResponse(scores=tensor_to_proto(scores.total), parts=parts)


def scores_from_proto(message: reward_pb2.ScoreResponse, sequences: int) -> Scores:
    """Scores of so many sequences from their message. Raises InvalidRequest."""
    return Scores(
        total=floats_from_proto(message.scores, "scores", sequences),
        parts={name: floats_from_proto(values, f"parts.{name}", sequences) for name, values in message.parts.items()},
    )
