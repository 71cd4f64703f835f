"""Settings of the correction for the difference between engine and trainer, and combinations that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.loading import config_of, parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError


def config(correction: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "rollout": rollout or {},
        "algorithm": {**algorithm, **({} if correction is None else {"rollout_correction": correction})},
    }
    return parse_config(tree, "test")


ENGINE = {"old_log_probs": "rollout", "correction": {"level": "none"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": {"level": "none", "treatment": "mask"}}, r"treatment mask: level none has no weights"),
        ({"correction": {"level": "none", "upper": 3.0}}, r"upper 3\.0: level none has no weights"),
        ({"correction": {"level": "none", "lower": 0.5}}, r"lower 0\.5: level none has no weights"),
        ({"correction": {"level": "none", "normalize": True}}, r"normalize: level none has no weights"),
        ({"correction": {"upper": None}}, r"upper null: level token needs a bound; set upper or lower, or level none"),
        ({"correction": {"lower": 1.5}}, r"lower 1\.5: .* expected at most 1"),
        ({"correction": {"treatment": "seq_mask", "lower": 1.5}}, r"lower 1\.5: .* expected at most 1"),
        ({"correction": {"treatment": "mask", "upper": 0.5}}, r"upper 0\.5: .* expected at least 1"),
        ({"correction": {"treatment": "truncate", "upper": 0.1}}, r"upper 0\.1: .* expected at least 1"),
        ({"correction": {"level": "sequence", "treatment": "seq_mask"}}, r"treatment seq_mask: .* set level token"),
        ({"correction": {"upper": 0}}, r"rollout_correction\.upper"),
        ({"correction": {"off_policy_mask": -1}}, r"rollout_correction\.off_policy_mask"),
        ({"correction": {"level": "batch"}}, r"rollout_correction\.level"),
        ({"correction": {"rejection": [{"statistic": "token_k2", "upper": 1, "lower": 0.5}]}}, r"remove lower"),
        ({"correction": {"rejection": [{"statistic": "seq_sum_k1", "upper": 0.9}]}}, r"expected at least 1"),
        (
            {"correction": {"rejection": [{"statistic": "seq_sum_k1", "upper": 1.5, "lower": 1.6}]}},
            r"lower 1\.6: .* expected at most 1",
        ),
        (
            {"correction": {"rejection": [{"statistic": "token_k1", "upper": 0.9, "lower": 0.5}]}},
            r"upper 0\.9: .* expected at least 1",
        ),
        ({"correction": {"rejection": [{"statistic": "seq_max_k1", "upper": 1.5}]}}, r"rejection\.0\.statistic"),
        (
            {"correction": {"rejection": [{"statistic": "token_k1", "upper": 1.5}] * 2}},
            r"rejection: token_k1 is there twice",
        ),
        (
            {"old_log_probs": "rollout"},
            r"old_log_probs rollout: .* count the difference twice; set algorithm\.rollout_correction\.level none",
        ),
        (
            {"correction": {"level": "none"}, "rollout": {"max_off_policy_steps": 1}},
            r"rollout\.max_off_policy_steps 1: .* needs a correction; set algorithm\.rollout_correction\.level",
        ),
        (
            {"correction": {"level": "none", "off_policy_mask": 0.5}, "rollout": {"max_off_policy_steps": 1}},
            r"rollout\.max_off_policy_steps 1: .* needs a correction",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"correction": {"level": "none", "upper": None}},
        {"correction": {"upper": None, "lower": 0.5}},
        {"correction": {"treatment": "seq_mask", "lower": 0.99, "upper": 1.01}},
        {"correction": {"level": "geometric_mean", "treatment": "mask", "upper": 1.01}},
        {"correction": {"level": "none", "rejection": [{"statistic": "token_k1", "upper": 1.5, "lower": 0.2}]}},
        ENGINE,
        {**ENGINE, "rollout": {"max_off_policy_steps": 1}},
        {"old_log_probs": "rollout", "correction": {"level": "none", "off_policy_mask": 0.5}},
        {
            "correction": {"level": "none", "rejection": [{"statistic": "seq_mean_k3", "upper": 0.1}]},
            "rollout": {"max_off_policy_steps": 1},
        },
    ],
    ids=str,
)
def test_a_valid_correction_is_unchanged_after_a_round_trip(settings: dict[str, Any]) -> None:
    whole = config(**settings)
    assert config_of(whole.model_dump(mode="json")) == whole


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("vllm_importance_sampling_clip_max", "algorithm.rollout_correction.upper"),
        ("rollout_rs", "algorithm.rollout_correction.rejection"),
        ("behave_imp_weight_cap", "algorithm.rollout_correction.upper"),
        ("off_policy_mask_threshold", "algorithm.rollout_correction.off_policy_mask"),
        ("bypass_mode", "algorithm.old_log_probs"),
    ],
)
def test_a_name_of_another_project_leads_to_the_setting(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        config(**{name: 2.0})
