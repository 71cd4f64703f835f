"""Conditions on the size of a step, the estimator, the schedules, the scores and the models that a run saves."""

from __future__ import annotations

from quartet.config.rollout import MAX_RESPONSES
from quartet.config.tree import ConfigTree


def check_distillation(config: ConfigTree) -> None:
    """Raise ValueError if the other sections do not fit algorithm.distillation."""
    algorithm = config.algorithm
    if algorithm.distillation is None:
        return
    if config.reference.model is None:
        raise ValueError(
            "algorithm.distillation: the reference is the teacher, and reference.model is null; set reference.model to a model "
            "with the tokenizer of actor.model"
        )
    if algorithm.kl_coefficient:
        raise ValueError(
            f"algorithm.kl_coefficient {algorithm.kl_coefficient:g}: with algorithm.distillation the reference is the teacher, "
            "so the KL penalty is the same term again; set kl_coefficient 0"
        )
    if algorithm.response_ratio:
        raise ValueError(
            f"algorithm.{algorithm.response_ratio}: algorithm.distillation gives each token its own advantage; use a loss with "
            "one ratio per token, such as clipped with ratio_level token"
        )


def check_reward_service(config: ConfigTree) -> None:
    """Raise ValueError if reward.source none comes with settings of a shared or divided reward service.

    Its address and a single device are allowed, because the layers of a deployment give them to all runs.
    """
    if config.has_reward:
        return
    service = config.services.reward
    for key, given in (
        ("sharing", service.sharing is not None),
        ("nodes", service.nodes > 1),
        ("processes", service.processes > 1),
        ("devices", len(service.devices) > 1),
    ):
        if given:
            raise ValueError(
                f"services.reward.{key}: with reward.source none there is no reward service; remove it, or set another "
                "reward.source"
            )


def check_scores(config: ConfigTree) -> None:
    """Raise ValueError if the other sections do not fit reward.source none."""
    if config.has_scores:
        return
    algorithm = config.algorithm
    if algorithm.distillation is None:
        raise ValueError(
            "reward.source none: there is nothing to learn from; set algorithm.distillation, an environment with rewards "
            "(rollout.max_turns), or another source"
        )
    if algorithm.has_critic:
        raise ValueError(
            f"algorithm.estimator {algorithm.estimator}: its critic predicts scores, and with reward.source none there are none; "
            "set estimator reinforce"
        )
    for setting, given in (
        ("score.normalize", algorithm.score.normalize != "none"),
        ("score.scale", algorithm.score.scale != 1),
        ("score.clip", algorithm.score.clip is not None),
        (
            f"truncation.treatment {algorithm.truncation.treatment}",
            algorithm.truncation.treatment in ("penalty", "scale"),
        ),
        ("length_penalty.per_token", algorithm.length_penalty.per_token > 0),
        ("overlong_penalty.buffer_tokens", algorithm.overlong_penalty.buffer_tokens > 0),
    ):
        if given:
            raise ValueError(
                f"algorithm.{setting}: changes scores, and with reward.source none there are none; remove it"
            )


def check_sizes(config: ConfigTree) -> None:
    """Raise ValueError if a step has too many responses, or too few for its mini-batches."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if samples > MAX_RESPONSES:
        raise ValueError(
            f"rollout: prompts_per_step times samples_per_prompt is {samples}; expected at most {MAX_RESPONSES}"
        )
    generated = samples + config.rollout.prompts_per_step * config.rollout.extra_samples
    if generated > MAX_RESPONSES:
        raise ValueError(
            f"rollout.extra_samples: a step generates {generated} trajectories; expected at most {MAX_RESPONSES}; lower it"
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
        remedy = (
            "a session of a user has one; set an estimator that compares none, such as reinforce_plus_plus"
            if config.has_traffic
            else f"set rollout.samples_per_prompt to {spec.min_samples} or more, not {samples}"
        )
        raise ValueError(f"{setting}: compares the samples of a prompt; {remedy}")
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


def check_best_checkpoint(config: ConfigTree) -> None:
    """Raise ValueError if checkpoints have no value of checkpoint.best_metric."""
    metric, every = config.checkpoint.best_metric, config.evaluation.every_steps
    if metric is None or not metric.startswith("eval_"):
        return
    if not every:
        raise ValueError(
            f"checkpoint.best_metric {metric}: evaluation.every_steps is 0, so there are no evaluations; set it above 0"
        )
    if config.checkpoint.every_steps % every:
        raise ValueError(
            f"checkpoint.best_metric {metric}: each checkpoint needs an evaluation; set checkpoint.every_steps, which is "
            f"{config.checkpoint.every_steps}, to a multiple of evaluation.every_steps {every}"
        )


def check_average(config: ConfigTree) -> None:
    """Raise ValueError if the weights of the policy, of which actor.ema_decay keeps an average, are divided over ranks."""
    service, decay = config.services.actor, config.actor.ema_decay
    if decay is not None and service.num_ranks > 1:
        raise ValueError(
            f"actor.ema_decay {decay:g}: one process keeps the average of all weights, and services.actor divides them over "
            f"{service.num_ranks} ranks; give the actor one device or process, or set ema_decay null"
        )


def check_synchronization(config: ConfigTree) -> None:
    """Raise ValueError if the reference cannot take over a part of the policy, as reference.sync_steps demands."""
    steps = config.reference.sync_steps
    if steps is None:
        return
    setting = f"reference.sync_steps {steps}"
    if config.actor.lora is not None:
        raise ValueError(
            f"{setting}: the base model of actor.lora is the reference, and an adapter has no part of its weights; set "
            "sync_steps null, or lora null"
        )
    if config.reference.model is not None:
        raise ValueError(
            f"{setting}: a part of the policy is mixed into the initial policy, and reference.model names another model; set "
            "sync_steps null, or reference.model null"
        )
    if (ranks := config.services.reference.num_ranks) > 1:
        raise ValueError(
            f"{setting}: one process loads each version, and services.reference divides its model over {ranks} ranks; give the "
            "reference one device or process, or several addresses"
        )
