"""Update requests: losses and optimization settings for the updates of the actor and the critic."""

from __future__ import annotations

from concurrent.futures import Future

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.models import TrainedModelConfig
from quartet.config.rollout import RolloutConfig
from quartet.config.rollout_correction import RolloutCorrectionConfig
from quartet.config.root import Config
from quartet.contract.update import (
    OptimizationSettings,
    PolicyLossSettings,
    RejectionRule,
    RolloutCorrection,
    UpdateResult,
    ValueLossSettings,
)
from quartet.ppo.learning_rate import scheduled_learning_rate
from quartet.rpc.clients import ActorClient, CriticClient


def learning_rate_at(config: Config, trained: TrainedModelConfig, step: int) -> float:
    """Return the scheduled learning rate of ``step``, counted from 1.

    The actor's schedule begins at the end of the value pretraining. Until then its rate is 0, because it is not updated.
    """
    pretraining = config.algorithm.value_pretraining_steps if trained is config.actor else 0
    if step <= pretraining:
        return 0.0
    return scheduled_learning_rate(
        step - pretraining,
        config.run.steps - pretraining,
        trained.learning_rate,
        trained.final_learning_rate,
        trained.warmup_steps,
        trained.schedule,
    )


def optimization_at(
    config: Config,
    trained: TrainedModelConfig,
    step: int,
    learning_rate: float | None = None,
    micro_batch_tokens: int = 0,
) -> OptimizationSettings:
    """Return the optimisation settings of ``step``. The policy is not updated while the values are pretrained.

    ``learning_rate`` overrides the schedule. ``micro_batch_tokens`` is the run's own number; 0 leaves it to the service.
    """
    algorithm = config.algorithm
    frozen = trained is config.actor and algorithm.pretrains_values(step)
    return OptimizationSettings(
        num_epochs=0 if frozen else algorithm.num_epochs,
        num_mini_batches=algorithm.num_mini_batches,
        learning_rate=learning_rate_at(config, trained, step) if learning_rate is None else learning_rate,
        max_grad_norm=trained.optimizer.max_grad_norm,
        seed=config.run.seed,
        skip_non_finite=algorithm.non_finite == "skip",
        micro_batch_tokens=micro_batch_tokens,
    )


def policy_loss_of(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> PolicyLossSettings:
    """Return the configured policy loss, with the defaults of the loss for settings that are null."""
    clip_low, clip_high = algorithm.clip_range
    has_divisor = algorithm.aggregation == "sequence_mean_token_sum_norm"
    return PolicyLossSettings(
        temperature=rollout.temperature,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=algorithm.dual_clip or 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl_loss=algorithm.kl_loss or "none",
        kl_loss_coefficient=algorithm.kl_coefficient if algorithm.has_kl_loss else 0.0,
        ratio_level=algorithm.ratio_level,
        aggregation=algorithm.aggregation,
        target_kl=algorithm.target_kl or 0.0,
        policy_loss=algorithm.policy_loss,
        parameters=algorithm.loss_parameters,
        loss_divisor=(algorithm.loss_divisor or float(rollout.max_response_tokens)) if has_divisor else 0.0,
        rollout_correction=rollout_correction_of(algorithm.rollout_correction),
        old_log_probs=algorithm.old_log_probs,
    )


def rollout_correction_of(config: RolloutCorrectionConfig) -> RolloutCorrection:
    """Return the configured correction for the difference between engine and trainer. Without weights it has no bounds."""
    has_weights = config.level != "none"
    return RolloutCorrection(
        level=config.level,
        treatment=config.treatment,
        lower=config.lower or 0.0,
        upper=(config.upper or 0.0) if has_weights else 0.0,
        normalize=config.normalize,
        rejection=tuple(RejectionRule(rule.statistic, rule.upper, rule.lower or 0.0) for rule in config.rejection),
        off_policy_mask=config.off_policy_mask or 0.0,
    )


def value_loss_of(algorithm: AlgorithmConfig) -> ValueLossSettings:
    """Return the configured value loss."""
    return ValueLossSettings(algorithm.value_clip)


def start_update(
    client: ActorClient | CriticClient,
    config: Config,
    step: int,
    leader_epoch: int,
    learning_rate: float | None = None,
    micro_batch_tokens: int = 0,
) -> Future[UpdateResult]:
    """Start the update of ``step``. The same ``config`` and ``learning_rate`` always give the same request."""
    if isinstance(client, ActorClient):
        optimization = optimization_at(config, config.actor, step, learning_rate, micro_batch_tokens)
        loss = policy_loss_of(config.algorithm, config.rollout)
        return client.update(config.run.name, step, leader_epoch, optimization, loss)
    optimization = optimization_at(config, config.critic, step, learning_rate, micro_batch_tokens)
    return client.update(config.run.name, step, leader_epoch, optimization, value_loss_of(config.algorithm))
