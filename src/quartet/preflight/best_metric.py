"""Check of the metric that decides which checkpoint is the best."""

from __future__ import annotations

import re
from difflib import get_close_matches

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.telemetry.step_metrics import EVALUATION_METRICS, STEP_METRICS


def check_best_metric(config: Config) -> None:
    """Check that checkpoint.best_metric is the name of a metric of a step or of an evaluation. Raises ConfigError."""
    metric = config.checkpoint.best_metric
    names = [each.name for each in (*STEP_METRICS, *EVALUATION_METRICS)]
    if metric is None or any(re.fullmatch(name.replace("NAME", ".+"), metric) for name in names):
        return
    similar = ", ".join(get_close_matches(metric, names, n=3, cutoff=0.4)) or "reward_mean, eval_reward_sampled"
    raise ConfigError(
        f"checkpoint.best_metric {metric}: no metric has this name; expected one of docs/reference/metrics.md, such as {similar}"
    )
