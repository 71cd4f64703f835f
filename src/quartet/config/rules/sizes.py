"""Conditions on the size of a step, the estimator and the schedules."""

from __future__ import annotations

from quartet.config.rollout import MAX_RESPONSES
from quartet.config.tree import ConfigTree


def check_sizes(config: ConfigTree) -> None:
    """Raise ValueError if a step has too many responses, or too few for its mini-batches."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if samples > MAX_RESPONSES:
        raise ValueError(
            f"rollout: prompts_per_step times samples_per_prompt is {samples}; expected at most {MAX_RESPONSES}"
        )
    if config.algorithm.num_mini_batches > samples:
        raise ValueError(
            f"algorithm.num_mini_batches {config.algorithm.num_mini_batches}: expected at most the {samples} responses of "
            "a step"
        )
    buffer, limit = config.algorithm.overlong_penalty.buffer_tokens, config.rollout.max_response_tokens
    if buffer > limit:
        raise ValueError(
            f"algorithm.overlong_penalty.buffer_tokens {buffer}: expected at most rollout.max_response_tokens {limit}"
        )


def check_warmup(config: ConfigTree) -> None:
    """Raise ValueError if a warm-up is longer than the training."""
    steps, pretraining = config.run.steps, config.algorithm.value_pretraining_steps
    if config.critic.warmup_steps > steps:
        raise ValueError(f"critic.warmup_steps {config.critic.warmup_steps}: expected at most run.steps {steps}")
    if config.actor.warmup_steps > steps - pretraining:
        less = f" less algorithm.value_pretraining_steps {pretraining}" if pretraining else ""
        raise ValueError(f"actor.warmup_steps {config.actor.warmup_steps}: expected at most run.steps {steps}{less}")


def check_estimator(config: ConfigTree) -> None:
    """Raise ValueError if other settings do not fit algorithm.estimator."""
    algorithm, setting = config.algorithm, f"algorithm.estimator {config.algorithm.estimator}"
    spec = algorithm.estimator_spec
    samples = config.rollout.samples_per_prompt
    if spec.uses_groups and samples < spec.min_samples:
        raise ValueError(
            f"{setting}: compares the samples of a prompt; set rollout.samples_per_prompt to {spec.min_samples} or more, "
            f"not {samples}"
        )
    responses = config.rollout.prompts_per_step * samples
    if not spec.uses_groups and responses < spec.min_samples:
        raise ValueError(f"{setting}: a step needs at least {spec.min_samples} responses, not {responses}")
    if spec.granularity == "sequence":
        if algorithm.gamma != 1:
            raise ValueError(
                f"algorithm.gamma {algorithm.gamma}: {setting} has one reward per response; leave gamma at 1"
            )
        if algorithm.whiten_rewards:
            raise ValueError(f"algorithm.whiten_rewards: {setting} has no token rewards; leave it false")
    elif algorithm.response_ratio:
        raise ValueError(
            f"algorithm.{algorithm.response_ratio}: {setting} gives each token its own advantage; "
            "use one with an advantage per response, such as reinforce, rloo or grpo, or a loss with one ratio per token"
        )
    if algorithm.value_pretraining_steps >= config.run.steps:
        raise ValueError(
            f"algorithm.value_pretraining_steps {algorithm.value_pretraining_steps}: the policy would never be trained; "
            f"expected less than run.steps {config.run.steps}"
        )
    if algorithm.value_pretraining_steps and not algorithm.has_critic:
        raise ValueError(
            f"algorithm.value_pretraining_steps {algorithm.value_pretraining_steps}: {setting} has no critic"
        )
    if not algorithm.has_critic and config.services.critic.address:
        raise ValueError(f"services.critic.address: {setting} has no critic; leave it null")
