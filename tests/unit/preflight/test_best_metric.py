"""The metric of the best checkpoint: its name, and the settings that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config import Config, parse_config
from quartet.errors import ConfigError
from quartet.preflight.best_metric import check_best_metric


def config(checkpoint: dict[str, Any], evaluation: dict[str, Any] | None = None) -> Config:
    return parse_config(
        {
            "data": {"prompts": "p", "validation": "v"},
            "actor": {"model": "a"},
            "reward": {"model": "r"},
            "checkpoint": checkpoint,
            "evaluation": evaluation or {},
        },
        "test",
    )


@pytest.mark.parametrize("metric", ["reward_mean", "set_math_reward_mean", "reward_style_mean", "value_loss"])
def test_any_metric_of_a_step_can_decide(metric: str) -> None:
    check_best_metric(config({"best_metric": metric}))


def test_a_metric_of_evaluations_can_decide() -> None:
    check_best_metric(config({"best_metric": "eval_reward_sampled", "every_steps": 20}, {"every_steps": 10}))


def test_an_unknown_metric_is_refused_with_similar_names() -> None:
    with pytest.raises(ConfigError, match=r"best_metric reward_men: no metric has this name; .* such as reward_mean"):
        check_best_metric(config({"best_metric": "reward_men"}))


@pytest.mark.parametrize(
    ("checkpoint", "evaluation", "message"),
    [
        ({"best_metric": "reward_mean", "every_steps": 0}, {}, "every_steps is 0, so there are no checkpoints"),
        ({"best_metric": "eval_kl"}, {}, "evaluation.every_steps is 0"),
        (
            {"best_metric": "eval_kl", "every_steps": 30},
            {"every_steps": 20},
            "to a multiple of evaluation.every_steps 20",
        ),
    ],
)
def test_settings_without_values_of_the_metric_are_refused(
    checkpoint: dict[str, Any], evaluation: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(checkpoint, evaluation)
