"""Messages of Update: optimization settings, losses and results."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quartet.codec.checks import positive, require_non_negative
from quartet.codec.rollout_correction import rollout_correction_from_proto, rollout_correction_to_proto
from quartet.config.policy_losses import MAX_PARAMETERS
from quartet.config.section import MAX_PARAMETER_NAME
from quartet.contract.update import (
    OptimizationSettings,
    PolicyLossSettings,
    UpdateRequest,
    UpdateResult,
    ValueLossSettings,
)
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import update_pb2

MAX_EPOCHS = 1000
"""Maximum passes over one step's experience in a request. An update cannot be interrupted, so its length needs a limit."""

_REQUIRED_METRICS = ("optimizer_steps", "skipped_steps")

_KL_LOSSES = {"none": update_pb2.KL_LOSS_NONE, "k2": update_pb2.KL_LOSS_K2, "k3": update_pb2.KL_LOSS_K3}
_KL_LOSS_NAMES = {number: name for name, number in _KL_LOSSES.items()}
_RATIO_LEVELS = {"token": update_pb2.RATIO_LEVEL_TOKEN, "sequence": update_pb2.RATIO_LEVEL_SEQUENCE}
_RATIO_LEVEL_NAMES = {number: name for name, number in _RATIO_LEVELS.items()}
_AGGREGATIONS = {
    "token_mean": update_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
    "sequence_mean": update_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN,
    "token_sum": update_pb2.LOSS_AGGREGATION_TOKEN_SUM,
    "sequence_mean_token_sum": update_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM,
    "sequence_mean_token_sum_norm": update_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN_TOKEN_SUM_NORM,
}
_AGGREGATION_NAMES = {number: name for name, number in _AGGREGATIONS.items()}
_OLD_LOG_PROBS = {"trainer": update_pb2.OLD_LOG_PROBS_TRAINER, "rollout": update_pb2.OLD_LOG_PROBS_ROLLOUT}
_OLD_LOG_PROBS_NAMES = {number: name for name, number in _OLD_LOG_PROBS.items()}


def optimization_to_proto(settings: OptimizationSettings) -> update_pb2.OptimizationSettings:
    """Convert optimization settings."""
    return update_pb2.OptimizationSettings(
        num_epochs=settings.num_epochs,
        num_mini_batches=settings.num_mini_batches,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        skip_non_finite=settings.skip_non_finite,
        micro_batch_tokens=settings.micro_batch_tokens,
    )


def optimization_from_proto(message: update_pb2.OptimizationSettings) -> OptimizationSettings:
    """Convert and validate optimization settings. Raises InvalidRequest."""
    if message.num_mini_batches < 1:
        raise InvalidRequest("optimization.num_mini_batches 0: expected at least 1")
    if message.num_epochs > MAX_EPOCHS:
        raise InvalidRequest(f"optimization.num_epochs {message.num_epochs}: expected at most {MAX_EPOCHS}")
    require_non_negative(message, "learning_rate", "max_grad_norm")
    return OptimizationSettings(
        num_epochs=message.num_epochs,
        num_mini_batches=message.num_mini_batches,
        learning_rate=message.learning_rate,
        max_grad_norm=message.max_grad_norm,
        seed=message.seed,
        skip_non_finite=message.skip_non_finite,
        micro_batch_tokens=message.micro_batch_tokens,
    )


def update_request_to_proto(request: UpdateRequest) -> update_pb2.UpdateRequest:
    """Convert the arguments of an Update call."""
    policy, value = None, None
    if isinstance(request.loss, PolicyLossSettings):
        policy = _policy_loss_to_proto(request.loss)
    else:
        value = update_pb2.ValueLossSettings(value_clip=request.loss.value_clip)
    return update_pb2.UpdateRequest(
        run=request.run,
        step=request.step,
        leader_epoch=request.leader_epoch,
        optimization=optimization_to_proto(request.optimization),
        policy_loss=policy,
        value_loss=value,
    )


def update_request_from_proto(message: update_pb2.UpdateRequest) -> UpdateRequest:
    """Convert and validate the arguments of an Update call. Raises InvalidRequest."""
    loss: PolicyLossSettings | ValueLossSettings
    match message.WhichOneof("loss"):
        case "policy_loss":
            loss = _policy_loss_from_proto(message.policy_loss)
        case "value_loss":
            loss = _value_loss_from_proto(message.value_loss)
        case _:
            raise InvalidRequest("loss: expected policy_loss or value_loss")
    return UpdateRequest(
        message.run, message.step, message.leader_epoch, optimization_from_proto(message.optimization), loss
    )


def update_result_to_proto(result: UpdateResult) -> update_pb2.UpdateResponse:
    """Convert the result of an update."""
    return update_pb2.UpdateResponse(step=result.step, policy_version=result.policy_version, metrics=result.metrics)


def update_result_from_proto(message: update_pb2.UpdateResponse, step: int) -> UpdateResult:
    """Convert and validate the result of the update of ``step``. Raises ServiceFailed."""
    metrics = dict(message.metrics)
    if message.step != step:
        raise ServiceFailed(f"Update of step {step}: the response is for step {message.step}")
    for name in (*_REQUIRED_METRICS, *metrics):
        if not math.isfinite(metrics.get(name, math.nan)):
            raise ServiceFailed(
                f"Update of step {step}: metric {name} is {metrics.get(name)}, expected a finite number"
            )
    return UpdateResult(message.step, message.policy_version, metrics)


def _policy_loss_to_proto(loss: PolicyLossSettings) -> update_pb2.PolicyLossSettings:
    return update_pb2.PolicyLossSettings(
        temperature=loss.temperature,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        entropy_coefficient=loss.entropy_coefficient,
        kl_loss=_KL_LOSSES[loss.kl_loss],
        kl_loss_coefficient=loss.kl_loss_coefficient,
        ratio_level=_RATIO_LEVELS[loss.ratio_level],
        aggregation=_AGGREGATIONS[loss.aggregation],
        target_kl=loss.target_kl,
        policy_loss=loss.policy_loss,
        parameters=loss.parameters,
        loss_divisor=loss.loss_divisor,
        rollout_correction=rollout_correction_to_proto(loss.rollout_correction),
        old_log_probs=_OLD_LOG_PROBS[loss.old_log_probs],
    )


def _policy_loss_from_proto(message: update_pb2.PolicyLossSettings) -> PolicyLossSettings:
    require_non_negative(
        message,
        "clip_low",
        "clip_high",
        "dual_clip",
        "entropy_coefficient",
        "kl_loss_coefficient",
        "target_kl",
        "loss_divisor",
    )
    if 0 < message.dual_clip <= 1:
        raise InvalidRequest(f"policy_loss.dual_clip {message.dual_clip}: expected 0 (off) or more than 1")
    if not message.policy_loss:
        raise InvalidRequest("policy_loss.policy_loss: empty, expected the name or import path of a policy loss")
    kl_loss = _KL_LOSS_NAMES.get(message.kl_loss)
    if kl_loss is None:
        raise InvalidRequest(f"policy_loss.kl_loss {message.kl_loss}: unknown")
    ratio_level = _RATIO_LEVEL_NAMES.get(message.ratio_level)
    if ratio_level is None:
        raise InvalidRequest(f"policy_loss.ratio_level {message.ratio_level}: unknown")
    aggregation = _AGGREGATION_NAMES.get(message.aggregation)
    if aggregation is None:
        raise InvalidRequest(f"policy_loss.aggregation {message.aggregation}: unknown")
    if aggregation == "sequence_mean_token_sum_norm" and message.loss_divisor == 0:
        raise InvalidRequest(f"policy_loss.loss_divisor 0: expected more than 0 with aggregation {aggregation}")
    old_log_probs = _OLD_LOG_PROBS_NAMES.get(message.old_log_probs)
    if old_log_probs is None:
        raise InvalidRequest(f"policy_loss.old_log_probs {message.old_log_probs}: unknown")
    correction = rollout_correction_from_proto(message.rollout_correction)
    if old_log_probs == "rollout" and correction.level != "none":
        raise InvalidRequest(
            "policy_loss.old_log_probs rollout: the ratio compares with the engine; expected rollout_correction.level none"
        )
    return PolicyLossSettings(
        temperature=positive(message.temperature, "policy_loss.temperature"),
        clip_low=message.clip_low,
        clip_high=message.clip_high,
        dual_clip=message.dual_clip,
        entropy_coefficient=message.entropy_coefficient,
        kl_loss=kl_loss,  # type: ignore[arg-type]
        kl_loss_coefficient=message.kl_loss_coefficient,
        ratio_level=ratio_level,  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        target_kl=message.target_kl,
        policy_loss=message.policy_loss,
        parameters=_loss_parameters(message.parameters),
        loss_divisor=message.loss_divisor,
        rollout_correction=correction,
        old_log_probs=old_log_probs,  # type: ignore[arg-type]
    )


def _loss_parameters(message: Mapping[str, float]) -> dict[str, float]:
    if len(message) > MAX_PARAMETERS:
        raise InvalidRequest(f"policy_loss.parameters: {len(message)}, expected at most {MAX_PARAMETERS}")
    for name, value in message.items():
        if not math.isfinite(value):
            raise InvalidRequest(
                f"policy_loss.parameters {name[:MAX_PARAMETER_NAME]} {value}: expected a finite number"
            )
        if not 0 < len(name) <= MAX_PARAMETER_NAME:
            raise InvalidRequest(
                f"policy_loss.parameters: a name of {len(name)} characters, expected 1 to {MAX_PARAMETER_NAME}"
            )
    return dict(message)


def _value_loss_from_proto(message: update_pb2.ValueLossSettings) -> ValueLossSettings:
    require_non_negative(message, "value_clip")
    return ValueLossSettings(value_clip=message.value_clip)
