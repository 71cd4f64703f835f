"""Update requests as a function of the config and the step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from quartet.codec.updates import update_request_from_proto, update_request_to_proto
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.config.section import MAX_SETTING
from quartet.contract.update import (
    OptimizationSettings,
    PolicyLossSettings,
    RejectionRule,
    RolloutCorrection,
    UpdateRequest,
    ValueLossSettings,
)
from quartet.errors import ConfigError
from quartet.services.orchestrator.algorithm.update_request import (
    learning_rate_at,
    optimization_at,
    policy_loss_of,
    value_loss_of,
)


def config(**sections: Any) -> Config:
    tree = {
        "run": {"steps": 10},
        "data": {"prompts": "p"},
        "actor": {"model": "a", "learning_rate": 1.0},
        "reward": {"model": "r"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse_config(tree, "test")


def rates(**actor: Any) -> list[float]:
    result = config(actor=actor)
    return [learning_rate_at(result, result.actor, step) for step in range(1, 11)]


def test_a_learning_rate_is_constant_by_default() -> None:
    assert rates() == [1.0] * 10


def test_a_warm_up_and_a_linear_schedule() -> None:
    result = rates(warmup_steps=2, schedule="linear", final_learning_rate=0.2)
    assert result == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])


def test_a_cosine_schedule_ends_after_the_last_step() -> None:
    result = rates(schedule="cosine", final_learning_rate=0.5)
    assert result == pytest.approx([0.75 + 0.25 * math.cos(math.pi * step / 10) for step in range(10)])
    assert result == sorted(result, reverse=True)


def test_the_policy_is_frozen_while_the_critic_warms_up() -> None:
    result = config(algorithm={"value_pretraining_steps": 2, "num_epochs": 3})
    assert [optimization_at(result, result.actor, step).num_epochs for step in (1, 2, 3)] == [0, 0, 3]
    assert [optimization_at(result, result.critic, step).num_epochs for step in (1, 2, 3)] == [3, 3, 3]


def test_the_schedule_of_the_actor_begins_after_the_value_pretraining() -> None:
    schedule = {"warmup_steps": 2, "schedule": "linear", "learning_rate": 1.0}
    result = config(algorithm={"value_pretraining_steps": 4}, actor=schedule, critic=schedule)
    actor, critic = (
        [learning_rate_at(result, trained, step) for step in range(1, 12)] for trained in (result.actor, result.critic)
    )
    assert actor == pytest.approx([0, 0, 0, 0, 0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    # The last 6 steps are those of a run of 6 steps.
    short = config(run={"steps": 6}, actor=schedule)
    assert actor[4:10] == [learning_rate_at(short, short.actor, step) for step in range(1, 7)]
    assert critic == pytest.approx([0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0])


def test_actor_and_critic_have_separate_schedules() -> None:
    result = config(critic={"learning_rate": 4.0, "warmup_steps": 4})
    assert [optimization_at(result, trained, 1).learning_rate for trained in (result.actor, result.critic)] == [
        1.0,
        1.0,
    ]
    assert [optimization_at(result, trained, 4).learning_rate for trained in (result.actor, result.critic)] == [
        1.0,
        4.0,
    ]


def test_the_treatment_of_nan_is_part_of_the_request() -> None:
    result = config()
    assert not optimization_at(result, result.actor, 1).skip_non_finite
    result = config(algorithm={"non_finite": "skip"})
    assert optimization_at(result, result.critic, 1).skip_non_finite


def test_every_optimisation_setting_is_sent() -> None:
    result = config(
        run={"seed": 11},
        algorithm={"num_epochs": 3, "num_mini_batches": 5, "non_finite": "skip"},
        actor={"learning_rate": 0.25, "optimizer": {"max_grad_norm": 0.7}},
        critic={"learning_rate": 0.5, "optimizer": {"max_grad_norm": 0.0}},
    )
    expected = OptimizationSettings(
        num_epochs=3, num_mini_batches=5, learning_rate=0.25, max_grad_norm=0.7, seed=11, skip_non_finite=True
    )
    assert optimization_at(result, result.actor, 4) == expected
    assert optimization_at(result, result.critic, 4) == replace(expected, learning_rate=0.5, max_grad_norm=0.0)
    assert optimization_at(result, result.actor, 4, 0.25, 512) == replace(expected, micro_batch_tokens=512)


@pytest.mark.parametrize("value_clip", [0.0, 0.45])
def test_every_value_loss_setting_is_sent(value_clip: float) -> None:
    assert value_loss_of(config(algorithm={"value_clip": value_clip}).algorithm) == ValueLossSettings(value_clip)


def test_every_policy_loss_setting_is_sent() -> None:
    options = {
        "clip_ratio": 0.1,
        "clip_ratio_high": 0.3,
        "dual_clip": 4.0,
        "entropy_coefficient": 0.01,
        "kl_loss": "k3",
        "kl_coefficient": 0.2,
        "estimator": "reinforce",
        "ratio_level": "sequence",
        "loss_aggregation": "sequence_mean",
        "rollout_correction": {
            "level": "sequence",
            "treatment": "mask",
            "upper": 3.0,
            "lower": 0.5,
            "normalize": True,
            "rejection": [{"statistic": "seq_mean_k1", "upper": 1.5}, {"statistic": "token_k3", "upper": 0.1}],
            "off_policy_mask": 0.2,
        },
        "target_kl": 0.5,
        "policy_loss": "package.module:loss",
        "policy_loss_parameters": {"strength": 2.5},
    }
    rules = (RejectionRule("seq_mean_k1", 1.5), RejectionRule("token_k3", 0.1))
    whole = config(algorithm=options, rollout={"temperature": 0.7})
    assert policy_loss_of(whole.algorithm, whole.rollout) == PolicyLossSettings(
        *(0.7, 0.1, 0.3, 4.0, 0.01, "k3", 0.2, "sequence", "sequence_mean", 0.5, "package.module:loss"),
        parameters={"strength": 2.5},
        rollout_correction=RolloutCorrection("sequence", "mask", 0.5, 3.0, True, rules, 0.2),
    )
    disabled = config(algorithm={"rollout_correction": {"level": "none"}, "clip_ratio": 0.1})
    assert policy_loss_of(disabled.algorithm, disabled.rollout) == PolicyLossSettings(clip_low=0.1, clip_high=0.1)


def test_the_default_correction_truncates_the_weights_of_tokens_at_2() -> None:
    default = config()
    expected = PolicyLossSettings(rollout_correction=RolloutCorrection("token", upper=2.0))
    assert policy_loss_of(default.algorithm, default.rollout) == expected


def test_the_old_log_probs_of_the_engine_come_without_weights() -> None:
    of_engine = config(algorithm={"old_log_probs": "rollout", "rollout_correction": {"level": "none"}})
    assert policy_loss_of(of_engine.algorithm, of_engine.rollout) == PolicyLossSettings(old_log_probs="rollout")


@pytest.mark.parametrize(("given", "divisor"), [(None, 24.0), (100.0, 100.0)])
def test_the_constant_divisor_of_the_loss_is_the_response_limit_by_default(given: float | None, divisor: float) -> None:
    whole = config(
        algorithm={"loss_aggregation": "sequence_mean_token_sum_norm", "loss_divisor": given},
        rollout={"max_response_tokens": 24},
    )
    assert policy_loss_of(whole.algorithm, whole.rollout).loss_divisor == divisor


LIMIT_SETTINGS: list[dict[str, Any]] = [
    {"clip_ratio": MAX_SETTING},
    {"clip_ratio_high": MAX_SETTING},
    {"dual_clip": MAX_SETTING},
    {"entropy_coefficient": MAX_SETTING},
    {"kl_loss": "k3", "kl_coefficient": MAX_SETTING},
    {"loss_aggregation": "sequence_mean_token_sum_norm", "loss_divisor": MAX_SETTING},
    {"target_kl": MAX_SETTING},
    {"rollout_correction": {"upper": MAX_SETTING}},
    {"rollout_correction": {"off_policy_mask": MAX_SETTING}},
    {"rollout_correction": {"rejection": [{"statistic": "token_k1", "upper": MAX_SETTING}]}},
    {"rollout_correction": {"rejection": [{"statistic": "token_k2", "upper": MAX_SETTING}]}},
]


def beyond(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: beyond(value) for key, value in settings.items()}
    if isinstance(settings, list):
        return [beyond(value) for value in settings]
    return 1e300 if settings == MAX_SETTING else settings


def request_of(settings: dict[str, Any]) -> UpdateRequest:
    tree = config(algorithm=settings)
    loss = policy_loss_of(tree.algorithm, tree.rollout)
    return UpdateRequest("run", 1, 1, optimization_at(tree, tree.actor, 1), loss)


@pytest.mark.parametrize("settings", LIMIT_SETTINGS, ids=str)
def test_the_largest_settings_of_a_config_pass_the_checks_of_a_request(settings: dict[str, Any]) -> None:
    request = request_of(settings)
    assert update_request_from_proto(update_request_to_proto(request)) == request
    with pytest.raises(ConfigError, match="expected at most"):
        config(algorithm=beyond(settings))


@pytest.mark.parametrize("own", [{"policy_loss": "my:loss"}, {"estimator": "my:own", "custom_estimator": {}}], ids=str)
def test_parameters_of_a_custom_function_are_limited(own: dict[str, Any]) -> None:
    key = "policy_loss_parameters" if "policy_loss" in own else "estimator_parameters"
    request = request_of({**own, key: {f"{number:064d}": 1.0 for number in range(32)}})
    assert update_request_from_proto(update_request_to_proto(request)) == request
    for parameters in ({"": 1.0}, {"a" * 65: 1.0}, {str(number): 1.0 for number in range(33)}):
        with pytest.raises(ConfigError, match=key):
            config(algorithm={**own, key: parameters})
