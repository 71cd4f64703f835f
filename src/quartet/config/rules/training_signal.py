"""Conditions on the training signal: the scores of a run, and the teacher of a distillation."""

from __future__ import annotations

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
