"""Each guard raises an alert for its metrics and none for a healthy run."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.guards import GuardsConfig
from quartet.contract.control import Alert
from quartet.services.orchestrator.control.guards import Guards

HEALTHY = {
    "reward_mean": 1.0,
    "reward_std": 1.0,
    "kl_mean": 4.0,
    "response_tokens_mean": 20.0,
    "entropy": 3.0,
    "rollout_mismatch_kl": 1e-6,
    "repetition": 0.05,
    "eos_rate": 0.95,
    "length_reward_correlation": 0.1,
    "explained_variance": 0.6,
    "skipped_steps_actor": 0.0,
    "skipped_steps_critic": 0.0,
}


def run(steps: list[dict[str, float]], **config: Any) -> list[Alert]:
    """Return the alerts of a run with healthy metrics, except for the changes of each step."""
    guards = Guards(GuardsConfig(**{"window_steps": 8, **config}))
    result: list[Alert] = []
    for number, changes in enumerate(steps, 1):
        result += guards.check({"step": number, **HEALTHY, **changes})
    return result


def names(alerts: list[Alert]) -> list[str]:
    return [alert.guard for alert in alerts]


def rising(count: int, **ends: tuple[float, float]) -> list[dict[str, float]]:
    """Return steps in which each metric changes linearly from its first to its last value."""
    return [
        {name: first + (last - first) * index / (count - 1) for name, (first, last) in ends.items()}
        for index in range(count)
    ]


def test_a_healthy_run_raises_no_alert() -> None:
    # In a healthy run, reward and KL rise and the length is stable.
    assert run(rising(60, reward_mean=(0.0, 3.0), kl_mean=(0.0, 11.0), response_tokens_mean=(20.0, 24.0))) == []


def test_a_rule_that_does_not_apply_and_metrics_that_are_absent_raise_no_alert() -> None:
    far = {"kl_mean": 500.0}
    assert names(run([far] * 20)) != []
    guards = Guards(GuardsConfig(window_steps=8), ignored=("kl_runaway",))
    healthy = {name: value for name, value in HEALTHY.items() if name not in ("reward_mean", "reward_std")}
    assert [alert for step in range(1, 21) for alert in guards.check({"step": step, **healthy, **far})] == []


REWARD_HACKING = rising(10, reward_mean=(0.0, 4.0), kl_mean=(2.0, 8.0), response_tokens_mean=(10.0, 40.0))


def test_a_joint_rise_of_reward_kl_and_length_is_reward_hacking() -> None:
    (alert,) = run(REWARD_HACKING, reward_hacking={"action": "pause"})
    assert (alert.guard, alert.action, alert.step) == ("reward_hacking", "pause", 8)
    for part in ("within 8 steps", "reward rose from", "KL from", "response length from", "tokens"):
        assert part in alert.evidence
    assert "algorithm.length_penalty" in alert.remedy


@pytest.mark.parametrize(
    "constant",
    [
        {"reward_mean": 1.0},
        {"kl_mean": 4.0},
        {"response_tokens_mean": 20.0},
        {"reward_std": 100.0},
    ],
    ids=lambda constant: next(iter(constant)),
)
def test_reward_hacking_requires_a_rise_of_all_three_metrics(constant: dict[str, float]) -> None:
    assert run([{**step, **constant} for step in REWARD_HACKING]) == []


@pytest.mark.parametrize(
    "threshold",
    [
        {"min_reward_rise": 5.0},
        {"min_kl_rise": 5.0},
        {"min_length_rise": 5.0, "min_length_rise_since_start": 5.0},
        {"min_kl": 50.0},
    ],
    ids=str,
)
def test_each_threshold_of_reward_hacking_applies(threshold: dict[str, float]) -> None:
    assert run(REWARD_HACKING, reward_hacking=threshold) == []


def test_a_slow_rise_over_many_windows_is_reward_hacking() -> None:
    alerts = run(rising(200, reward_mean=(0.0, 12.0), kl_mean=(0.1, 20.0), response_tokens_mean=(30.0, 589.0)))
    (first, *_) = [alert for alert in alerts if alert.guard == "reward_hacking"]
    assert "since the first steps" in first.evidence


def test_a_jump_in_the_first_steps_is_reward_hacking() -> None:
    start = rising(3, reward_mean=(0.0, 18.0), kl_mean=(0.1, 30.0), response_tokens_mean=(30.0, 96.0))
    (alert,) = run([*start, *[start[-1]] * 20], kl_runaway={"action": "off"}, window_steps=8)[:1]
    assert alert.guard == "reward_hacking"


def test_a_missing_metric_is_skipped() -> None:
    guards = Guards(GuardsConfig(window_steps=8))
    for number in range(1, 17):
        metrics = {name: value for name, value in HEALTHY.items() if name not in ("entropy", "rollout_mismatch_kl")}
        assert guards.check({"step": number, **metrics}) == []
    assert guards.entropy_slope(2.0) == 0.0


BOUNDS = {
    "kl_runaway": ({"kl_mean": 60.0}, "above", 100.0),
    "mismatch": ({"rollout_mismatch_kl": 0.1}, "above", 0.2),
    "repetition": ({"repetition": 0.6}, "above", 0.7),
    "missing_eos": ({"eos_rate": 0.1}, "below", 0.05),
    "length_reward": ({"length_reward_correlation": 0.9}, "above", 0.95),
    "critic_lost": ({"explained_variance": -1.0}, "below", -2.0),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_an_alert_names_the_metric_and_its_bound(name: str) -> None:
    changes, side, looser_bound = BOUNDS[name]
    (alert,) = run([changes] * 8)
    assert (alert.guard, alert.action) == (name, "warn")
    assert next(iter(changes)) in alert.evidence
    assert side in alert.evidence
    assert alert.remedy
    assert run([changes] * 8, **{name: {side: looser_bound}}) == []


def test_a_policy_that_unlearns_to_end_its_responses_raises_an_alert_before_most_are_cut_off() -> None:
    # The run of docs/hyperparameters.md that ends with 23 % of the responses: 0.96 at first, then 1.2 points less each step.
    falling = rising(60, eos_rate=(0.96, 0.23), response_tokens_mean=(18.0, 45.0))
    first, *_ = (alert for alert in run(falling, window_steps=20) if alert.guard == "missing_eos")
    assert first.step == 20
    assert falling[first.step - 1]["eos_rate"] > 0.7
    assert "eos_rate fell from 0.90 to 0.78 since the first steps, and response length went from 20" in first.evidence
    for part in ("algorithm.truncation.treatment penalty", "algorithm.truncation.penalty", "max_response_tokens"):
        assert part in first.remedy


def test_a_low_but_steady_rate_of_ended_responses_raises_no_alert_and_the_fall_can_be_allowed() -> None:
    assert run([{"eos_rate": 0.5}] * 40) == []
    assert run(rising(40, eos_rate=(0.5, 0.95))) == []
    falling = rising(40, eos_rate=(0.95, 0.5))
    assert names(run(falling, missing_eos={"min_fall": 1.0})) == []
    assert "missing_eos" in names(run(falling))


@pytest.mark.parametrize("name", BOUNDS)
def test_a_single_outlier_or_a_short_run_raises_no_alert(name: str) -> None:
    changes, _, _ = BOUNDS[name]
    assert run([changes] * 7) == []
    constant = {"kl_mean": 4.0, "rollout_mismatch_kl": 0.0, "repetition": 0.0, "eos_rate": 1.0}
    constant |= {"length_reward_correlation": 0.0, "explained_variance": 1.0}
    assert run([constant] * 7 + [changes] + [constant] * 7) == []


def test_an_entropy_far_below_the_first_steps_is_a_collapse() -> None:
    (alert,) = run(rising(16, entropy=(3.0, 0.1)), entropy_collapse={"below": 0.5})
    assert alert.guard == "entropy_collapse"
    assert "nats per token" in alert.evidence
    assert run(rising(16, entropy=(3.0, 0.1)), entropy_collapse={"below": 0.01}) == []
    # A policy with a low entropy from the start has not collapsed.
    assert run([{"entropy": 0.1}] * 16) == []


def test_a_skipped_optimizer_step_raises_an_alert_at_once() -> None:
    (alert,) = run([{"skipped_steps_actor": 2.0, "skipped_steps_critic": 1.0}], not_finite={"action": "stop"})
    assert (alert.guard, alert.action, alert.step) == ("not_finite", "stop", 1)
    assert "3 optimizer steps" in alert.evidence


def test_weights_that_changed_in_an_engine_raise_an_alert_at_once() -> None:
    (alert,) = run([{"weights_changed": 0.0}, {"weights_changed": 2.0}])
    assert (alert.guard, alert.action, alert.step) == ("weights_changed", "warn", 2)
    assert "2 Generate calls of step 2 ended with other weights" in alert.evidence


def test_a_disabled_rule_raises_no_alert() -> None:
    assert run([{"kl_mean": 60.0}] * 8, kl_runaway={"action": "off"}) == []


def test_a_rule_raises_one_alert_per_window() -> None:
    alerts = run([{"kl_mean": 60.0}] * 20)
    assert [alert.step for alert in alerts] == [8, 16]


def test_without_a_critic_its_rule_raises_no_alert() -> None:
    guards = Guards(GuardsConfig(window_steps=4))
    metrics = {
        name: value for name, value in HEALTHY.items() if name not in ("explained_variance", "skipped_steps_critic")
    }
    assert [guards.check({"step": step, **metrics}) for step in range(1, 9)] == [[]] * 8


def test_every_rule_of_the_config_can_raise_an_alert() -> None:
    rules = set(GuardsConfig.model_fields) - {"window_steps"}
    assert rules == {*BOUNDS, "not_finite", "weights_changed", "reward_hacking", "entropy_collapse"}


def test_the_entropy_slope_covers_the_window() -> None:
    guards = Guards(GuardsConfig(window_steps=4))
    slopes = []
    for step, entropy in enumerate([5.0, 3.0, 2.0, 1.0, 0.0, 0.0], 1):
        slopes.append(guards.entropy_slope(entropy))
        guards.check({"step": step, **HEALTHY, "entropy": entropy})
    # Least squares over the last four values: (-1.5 a - 0.5 b + 0.5 c + 1.5 d) / 5.
    assert slopes == pytest.approx([0.0, -2.0, -1.5, -1.3, -1.0, -0.7])


SWITCH = [{"reward_old_weight": 1.0, "reward_new_weight": 0.0}] * 10 + [
    {"reward_old_weight": 0.0, "reward_new_weight": 1.0}
] * 20


def test_a_switch_of_the_reward_source_is_no_reward_hacking() -> None:
    healthy = rising(10, reward_mean=(0.0, 0.5), kl_mean=(1.0, 4.0), response_tokens_mean=(10.0, 14.0))
    # The new source has another scale. KL and length rise on, as in a run that learns.
    jumped = rising(20, reward_mean=(50.0, 50.5), kl_mean=(6.0, 7.0), response_tokens_mean=(16.0, 18.0))
    steps = [*healthy, *jumped]
    assert "reward_hacking" in names(run(steps))
    assert run([{**step, **weights} for step, weights in zip(steps, SWITCH, strict=True)]) == []


def test_reward_hacking_after_a_switch_is_detected() -> None:
    steps = [{}] * 10 + rising(20, reward_mean=(50.0, 80.0), kl_mean=(2.0, 12.0), response_tokens_mean=(10.0, 60.0))
    alerts = run([{**step, **weights} for step, weights in zip(steps, SWITCH, strict=True)])
    assert alerts[0].guard == "reward_hacking"
    assert alerts[0].step >= 18


@pytest.mark.parametrize("guard", ["length_reward", "critic_lost"])
def test_bounds_that_depend_on_the_reward_start_anew_at_a_switch(guard: str) -> None:
    changes = BOUNDS[guard][0]
    steps = [{**(changes if number >= 10 else {}), **weights} for number, weights in enumerate(SWITCH)]
    assert run(steps)[0].step == 18


def test_the_entropy_is_compared_with_the_start_of_the_run_also_after_a_switch() -> None:
    steps = [{**({"entropy": 0.01} if number >= 10 else {}), **weights} for number, weights in enumerate(SWITCH)]
    assert names(run(steps))[0] == "entropy_collapse"
