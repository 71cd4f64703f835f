"""What an Update request says of how to update: losses, and the optimisation of one step."""

from __future__ import annotations

from quartet.config import AlgorithmConfig, Config, TrainedModelConfig
from quartet.ppo.schedules import scheduled_learning_rate
from quartet.rpc.clients import ActorClient, CriticClient, PendingResult
from quartet.types import OptimizationSettings, PolicyLossSettings, UpdateResult, ValueLossSettings


def learning_rate_at(config: Config, trained: TrainedModelConfig, step: int) -> float:
    """The learning rate of ``step``, counted from 1, by the model's schedule."""
    return scheduled_learning_rate(
        step,
        config.run.steps,
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
    """How ``trained`` walks through the experience of ``step``. The policy rests while the critic warms up.

    ``learning_rate`` where it is not the schedule's: it was another when the step was first taken, or a user has changed it.
    ``micro_batch_tokens`` as they are kept with the run.
    """
    algorithm = config.algorithm
    resting = trained is config.actor and step <= algorithm.critic_warmup_steps
    return OptimizationSettings(
        num_epochs=0 if resting else algorithm.num_epochs,
        num_mini_batches=algorithm.num_mini_batches,
        learning_rate=learning_rate_at(config, trained, step) if learning_rate is None else learning_rate,
        max_grad_norm=trained.optimizer.max_grad_norm,
        seed=config.run.seed,
        skip_non_finite=algorithm.non_finite == "skip",
        micro_batch_tokens=micro_batch_tokens,
    )


def policy_loss_of(algorithm: AlgorithmConfig, temperature: float) -> PolicyLossSettings:
    """The policy loss as configured."""
    return PolicyLossSettings(
        temperature=temperature,
        clip_low=algorithm.clip_ratio,
        clip_high=algorithm.clip_ratio_high or algorithm.clip_ratio,
        dual_clip=algorithm.dual_clip or 0.0,
        entropy_coefficient=algorithm.entropy_coefficient,
        kl_loss=algorithm.kl_loss,
        kl_loss_coefficient=algorithm.kl_loss_coefficient,
        ratio_level=algorithm.ratio_level,
        aggregation=algorithm.loss_aggregation,
        importance_sampling_cap=algorithm.importance_sampling_cap or 0.0,
        target_kl=algorithm.target_kl or 0.0,
    )


def value_loss_of(algorithm: AlgorithmConfig) -> ValueLossSettings:
    """The value loss as configured."""
    return ValueLossSettings(algorithm.value_clip)


def begin_update(
    client: ActorClient | CriticClient,
    config: Config,
    step: int,
    leader_epoch: int,
    learning_rate: float | None = None,
    micro_batch_tokens: int = 0,
) -> PendingResult[UpdateResult]:
    """Begins the update of ``step``. It says the same whenever it is said again, with the ``learning_rate`` that it had."""
    if isinstance(client, ActorClient):
        optimization = optimization_at(config, config.actor, step, learning_rate, micro_batch_tokens)
        loss = policy_loss_of(config.algorithm, config.rollout.temperature)
        return client.update(config.run.name, step, leader_epoch, optimization, loss)
    optimization = optimization_at(config, config.critic, step, learning_rate, micro_batch_tokens)
    return client.update(config.run.name, step, leader_epoch, optimization, value_loss_of(config.algorithm))
