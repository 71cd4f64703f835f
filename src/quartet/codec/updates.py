"""Messages of Update, and the commands that rank 0 of a worker group passes to the other ranks."""

from __future__ import annotations

import math
from typing import Any

from quartet.codec.messages import from_message, to_message
from quartet.contract.update import PolicyLossSettings, UpdateRequest, UpdateResult, ValueLossSettings
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import actor_pb2, critic_pb2, reference_pb2, reward_pb2, update_pb2

_LOSSES: dict[str, type[PolicyLossSettings | ValueLossSettings]] = {
    "policy_loss": PolicyLossSettings,
    "value_loss": ValueLossSettings,
}
_REQUIRED_METRICS = ("optimizer_steps", "skipped_steps")
_COMMANDS: dict[str, Any] = {
    "update": update_pb2.UpdateRequest,
    "save": update_pb2.SaveRequest,
    "restore": update_pb2.RestoreRequest,
    "log_probs": actor_pb2.ActorServiceLogProbsRequest,
    "values": critic_pb2.ValuesRequest,
    "score": reward_pb2.ScoreRequest,
    "reference_log_probs": reference_pb2.ReferenceServiceLogProbsRequest,
}
_KINDS = list(_COMMANDS)


def update_request_to_proto(request: UpdateRequest) -> update_pb2.UpdateRequest:
    """Convert the arguments of an Update call."""
    losses = {name: request.loss if isinstance(request.loss, loss) else None for name, loss in _LOSSES.items()}
    return to_message(update_pb2.UpdateRequest, request, **losses)


def update_request_from_proto(message: update_pb2.UpdateRequest) -> UpdateRequest:
    """Convert and validate the arguments of an Update call. Raises InvalidRequest."""
    field = message.WhichOneof("loss")
    if field is None:
        raise InvalidRequest(f"loss: expected {' or '.join(_LOSSES)}")
    return from_message(UpdateRequest, message, loss=from_message(_LOSSES[field], getattr(message, field), field))


def update_result_from_proto(message: update_pb2.UpdateResponse, step: int) -> UpdateResult:
    """Convert and validate the result of the update of ``step``. Raises ServiceFailed."""
    result = from_message(UpdateResult, message)
    if result.step != step:
        raise ServiceFailed(f"Update of step {step}: the response is for step {result.step}")
    for name in (*_REQUIRED_METRICS, *result.metrics):
        if not math.isfinite(result.metrics.get(name, math.nan)):
            raise ServiceFailed(
                f"Update of step {step}: metric {name} is {result.metrics.get(name)}, expected a finite number"
            )
    return result


def command_to_bytes(kind: str, request: Any) -> tuple[int, bytes]:
    """Return the number of the kind of a command, from 1, and the bytes of its request."""
    return 1 + _KINDS.index(kind), request.SerializeToString()


def command_from_bytes(number: int, data: bytes) -> tuple[str, Any]:
    """Return the kind of a number and its request."""
    kind = _KINDS[number - 1]
    return kind, _COMMANDS[kind].FromString(data)
