"""How an update is made: the optimisation of a step, and the losses."""

from __future__ import annotations

from quartet.codec.checks import positive, require_non_negative
from quartet.errors import InvalidRequest
from quartet.types import OptimizationSettings, PolicyLossSettings, ValueLossSettings
from quartet.v1 import actor_pb2, critic_pb2, update_pb2

MAX_EPOCHS = 1000
"""Most passes over one step's experience that a request may ask for: an update cannot be interrupted."""

_KL_LOSSES = {"none": actor_pb2.KL_LOSS_NONE, "k2": actor_pb2.KL_LOSS_K2, "k3": actor_pb2.KL_LOSS_K3}
_KL_LOSS_NAMES = {number: name for name, number in _KL_LOSSES.items()}
_RATIO_LEVELS = {"token": actor_pb2.RATIO_LEVEL_TOKEN, "sequence": actor_pb2.RATIO_LEVEL_SEQUENCE}
_RATIO_LEVEL_NAMES = {number: name for name, number in _RATIO_LEVELS.items()}
_AGGREGATIONS = {
    "token_mean": actor_pb2.LOSS_AGGREGATION_TOKEN_MEAN,
    "sequence_mean": actor_pb2.LOSS_AGGREGATION_SEQUENCE_MEAN,
}
_AGGREGATION_NAMES = {number: name for name, number in _AGGREGATIONS.items()}


def optimization_to_proto(settings: OptimizationSettings) -> update_pb2.OptimizationSettings:
    """Optimisation settings to their message."""
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
    """Optimisation settings from their message. Raises InvalidRequest."""
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


def policy_loss_to_proto(loss: PolicyLossSettings) -> actor_pb2.PolicyLossSettings:
    """Policy loss settings to their message."""
    return actor_pb2.PolicyLossSettings(
        temperature=loss.temperature,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        entropy_coefficient=loss.entropy_coefficient,
        kl_loss=_KL_LOSSES[loss.kl_loss],
        kl_loss_coefficient=loss.kl_loss_coefficient,
        ratio_level=_RATIO_LEVELS[loss.ratio_level],
        aggregation=_AGGREGATIONS[loss.aggregation],
        importance_sampling_cap=loss.importance_sampling_cap,
        target_kl=loss.target_kl,
        policy_loss=loss.policy_loss,
    )


def policy_loss_from_proto(message: actor_pb2.PolicyLossSettings) -> PolicyLossSettings:
    """Policy loss settings from their message. Raises InvalidRequest."""
    require_non_negative(
        message,
        "clip_low",
        "clip_high",
        "dual_clip",
        "entropy_coefficient",
        "kl_loss_coefficient",
        "importance_sampling_cap",
        "target_kl",
    )
    if 0 < message.dual_clip <= 1:
        raise InvalidRequest(f"loss.dual_clip {message.dual_clip}: expected 0 (off) or more than 1")
    if not message.policy_loss:
        raise InvalidRequest("loss.policy_loss: empty, expected the name or import path of a policy loss")
    kl_loss = _KL_LOSS_NAMES.get(message.kl_loss)
    if kl_loss is None:
        raise InvalidRequest(f"loss.kl_loss {message.kl_loss}: unknown")
    ratio_level = _RATIO_LEVEL_NAMES.get(message.ratio_level)
    if ratio_level is None:
        raise InvalidRequest(f"loss.ratio_level {message.ratio_level}: unknown")
    aggregation = _AGGREGATION_NAMES.get(message.aggregation)
    if aggregation is None:
        raise InvalidRequest(f"loss.aggregation {message.aggregation}: unknown")
    return PolicyLossSettings(
        temperature=positive(message.temperature, "loss.temperature"),
        clip_low=message.clip_low,
        clip_high=message.clip_high,
        dual_clip=message.dual_clip,
        entropy_coefficient=message.entropy_coefficient,
        kl_loss=kl_loss,  # type: ignore[arg-type]
        kl_loss_coefficient=message.kl_loss_coefficient,
        ratio_level=ratio_level,  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        importance_sampling_cap=message.importance_sampling_cap,
        target_kl=message.target_kl,
        policy_loss=message.policy_loss,
    )


def value_loss_to_proto(loss: ValueLossSettings) -> critic_pb2.ValueLossSettings:
    """Value loss settings to their message."""
    return critic_pb2.ValueLossSettings(value_clip=loss.value_clip)


def value_loss_from_proto(message: critic_pb2.ValueLossSettings) -> ValueLossSettings:
    """Value loss settings from their message. Raises InvalidRequest."""
    require_non_negative(message, "value_clip")
    return ValueLossSettings(value_clip=message.value_clip)
