"""The metric of the best checkpoint: its name, and whether the run has it."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.preflight.best_metric import check_best_metric


def config(
    checkpoint: dict[str, Any] | None = None, evaluation: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    tree: dict[str, Any] = {
        "data": {"prompts": "p", "validation": "v"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "checkpoint": checkpoint or {},
        "evaluation": evaluation or {},
    }
    return parse_config(tree | sections, "test")


RLOO = {"algorithm": {"estimator": "rloo"}, "rollout": {"samples_per_prompt": 2}}
SETS = {"data": {"sets": [{"name": "math", "path": "p"}]}}
EVALUATED = {
    "evaluation": {
        "every_steps": 50,
        "sets": [{"name": "gsm8k", "path": "p", "samples_per_prompt": 4, "pass_at": [1, 4]}],
    },
    "data": {"prompts": "p"},
}
ENSEMBLE = {"reward": {"source": "ensemble", "parts": [{"name": "style", "source": "model", "model": "r"}]}}
MASK = {"algorithm": {"rollout_correction": {"treatment": "mask"}}}
DISTILLATION: dict[str, Any] = {
    "algorithm": {"estimator": "reinforce", "distillation": {}, "kl_coefficient": 0.0},
    "reference": {"model": "t"},
    "reward": {"source": "none"},
}


@pytest.mark.parametrize(
    ("metric", "sections"),
    [
        ("reward_mean", {}),
        ("value_loss", {}),
        ("explained_variance", {}),
        ("rollout_mismatch_kl", RLOO),
        ("importance_truncated_fraction", {}),
        ("importance_masked_fraction", MASK),
        ("baseline_reward_mean", {"algorithm": {"estimator": "remax"}}),
        ("reference_version", {"reference": {"sync_steps": 2}}),
        ("set_math_reward_mean", SETS),
        ("reward_style_mean", ENSEMBLE),
        ("reward_style_missing", ENSEMBLE),
        ("reward_style_mean", {"services": {"reward": {"address": "127.0.0.1:5000"}}}),
        ("teacher_kl", DISTILLATION),
        ("eval_gsm8k_pass_at_4", EVALUATED),
        ("eval_gsm8k_reward_mean", EVALUATED),
    ],
)
def test_a_metric_of_each_step_can_decide(metric: str, sections: dict[str, Any]) -> None:
    check_best_metric(config({"best_metric": metric}, **sections))


@pytest.mark.parametrize(
    ("metric", "sections", "reason"),
    [
        ("value_loss", RLOO, "estimator is rloo, without a critic"),
        ("explained_variance", RLOO, "estimator is rloo, without a critic"),
        ("grad_norm_critic", RLOO, "estimator is rloo, without a critic"),
        ("baseline_reward_mean", RLOO, "estimator is rloo, without greedy responses"),
        ("reference_version", {}, "reference.sync_steps is null"),
        ("entropy_coefficient", {}, "entropy_coefficient is 0"),
        ("importance_ess", {"algorithm": {"rollout_correction": {"level": "none"}}}, "level is none"),
        ("importance_masked_fraction", {}, "treatment is truncate"),
        ("importance_truncated_fraction", MASK, "treatment is mask"),
        ("rejected_fraction", {}, "rejection is empty"),
        ("off_policy_masked_fraction", {}, "off_policy_mask is null"),
        ("off_policy_steps", {}, "max_off_policy_steps is 0"),
        ("in_flight_tokens", {}, "in_flight_updates is false"),
        ("turns_mean", {}, "max_turns is 0"),
        ("sampling_rounds", {}, "dynamic_sampling is false"),
        ("weight_update_bytes", {}, "the actor generates"),
        ("teacher_kl", {}, "distillation is null"),
        ("reward_mean", DISTILLATION, "source is none"),
        ("set_math_reward_mean", {}, "data.sets has no such set"),
        ("set_code_reward_mean", SETS, "data.sets has no such set"),
        ("reward_style_mean", {}, "reward.parts has no such part"),
        ("reward_tone_mean", ENSEMBLE, "reward.parts has no such part"),
        ("reward_style_weight", {}, "reward.parts has no such part"),
        ("eval_gsm8k_pass_at_2", EVALUATED, "evaluation.sets has no such set"),
        ("eval_other_eos_rate", EVALUATED, "evaluation.sets has no such set"),
        ("eval_reward_greedy", EVALUATED, "data.validation is null"),
    ],
)
def test_a_metric_that_the_run_does_not_have_is_refused(metric: str, sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"best_metric {metric}: the run does not have this metric.*{reason}"):
        check_best_metric(config({"best_metric": metric}, **sections))


def test_the_verdict_of_a_judge_needs_a_judge() -> None:
    checkpoint = {"best_metric": "eval_judge_win_rate", "every_steps": 20}
    check_best_metric(config(checkpoint, {"every_steps": 10, "judge": "my:judge"}))
    with pytest.raises(ConfigError, match=r"evaluation\.judge is null"):
        check_best_metric(config(checkpoint, {"every_steps": 10}))


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
