"""Commands that rank 0 of a worker group passes to the other ranks: requests as bytes, and their kinds as numbers."""

from __future__ import annotations

from typing import Any

from quartet.v1 import actor_pb2, critic_pb2, reference_pb2, reward_pb2, update_pb2

_REQUESTS: dict[str, Any] = {
    "update": update_pb2.UpdateRequest,
    "save": update_pb2.SaveRequest,
    "restore": update_pb2.RestoreRequest,
    "log_probs": actor_pb2.ActorServiceLogProbsRequest,
    "values": critic_pb2.ValuesRequest,
    "score": reward_pb2.ScoreRequest,
    "reference_log_probs": reference_pb2.ReferenceServiceLogProbsRequest,
}
_KINDS = list(_REQUESTS)


def command_to_bytes(kind: str, request: Any) -> tuple[int, bytes]:
    """Return the number of a kind, from 1, and the bytes of its request."""
    return 1 + _KINDS.index(kind), request.SerializeToString()


def command_from_bytes(number: int, data: bytes) -> tuple[str, Any]:
    """Return the kind of a number and its request."""
    kind = _KINDS[number - 1]
    return kind, _REQUESTS[kind].FromString(data)
