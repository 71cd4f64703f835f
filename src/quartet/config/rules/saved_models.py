"""Conditions on the models that a run saves: the best checkpoint, the average of the policy, and versions of the reference."""

from __future__ import annotations

from quartet.config.tree import ConfigTree


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
