"""Config of estimators with greedy baselines: what it derives from them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from tests.training.runs import merged
from tests.unit.config_files import REQUIRED

REMAX: dict[str, Any] = {**REQUIRED, "algorithm": {"estimator": "remax"}}


def config_of(**changes: Any) -> Config:
    return parse_config(merged(REMAX, changes), "test")


def test_remax_generates_one_greedy_response_per_prompt_and_has_no_critic() -> None:
    config = config_of(rollout={"samples_per_prompt": 1})
    assert (config.num_greedy_baselines, config.has_critic, config.algorithm.normalizes_advantages) == (1, False, False)
    assert config_of(algorithm={"estimator": "reinforce"}).num_greedy_baselines == 0


def test_a_custom_estimator_declares_that_it_needs_baselines() -> None:
    custom = {"estimator": "my:own", "custom_estimator": {"needs_greedy_baseline": True}}
    assert config_of(algorithm=custom).num_greedy_baselines == 1


@pytest.mark.parametrize(
    "estimator",
    [
        {"estimator": "remax"},
        {"estimator": "my:own", "custom_estimator": {"needs_greedy_baseline": True, "granularity": "token"}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("key", "value"), [("gamma", 0.9), ("whiten_rewards", True)])
def test_rewards_on_another_scale_than_the_greedy_baseline_are_refused(
    estimator: dict[str, Any], key: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}.*greedy baseline"):
        config_of(algorithm={**estimator, key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout": {"dynamic_sampling": True, "samples_per_prompt": 2}},
            r"rollout\.dynamic_sampling: .*estimator remax compares them with a greedy one",
        ),
        (
            {"reward": {"source": "none", "model": None}, "reference": {"model": "t"}}
            | {"algorithm": {"distillation": {}, "kl_coefficient": 0.0}},
            r"estimator remax: compares the scores .*reward\.source none",
        ),
        (
            {"rollout": {"prompts_per_step": 65_536, "samples_per_prompt": 1}, "algorithm": {"num_mini_batches": 1}},
            r"estimator remax: with its greedy responses a step has 131072 responses; expected at most 65536",
        ),
        (
            {"algorithm": {"ratio_level": "sequence"}},
            r"ratio_level sequence: .*remax gives each token its own advantage",
        ),
    ],
)
def test_settings_that_do_not_fit_greedy_baselines_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)
