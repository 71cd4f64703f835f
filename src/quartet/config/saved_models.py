"""Conditions on the models that a run saves: the best checkpoint, and the moving average of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quartet.config.root import Config


def check_best_checkpoint(config: Config) -> None:
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


def check_average(config: Config) -> None:
    """Raise ValueError if the weights of the policy, of which actor.ema_decay keeps an average, are divided over ranks."""
    service, decay = config.services.actor, config.actor.ema_decay
    if decay is not None and service.num_ranks > 1:
        raise ValueError(
            f"actor.ema_decay {decay:g}: one process keeps the average of all weights, and services.actor divides them over "
            f"{service.num_ranks} ranks; give the actor one device or process, or set ema_decay null"
        )
