"""The interface of estimators: what an estimator gets, what it may return, and the trial before a run."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from quartet.errors import ComputationFailed, ConfigError
from quartet.ppo.advantages import EstimatorInput, check_estimator, estimate
from quartet.ppo.gae import Advantages

LENGTHS = torch.tensor([1, 2])
GROUPS = torch.tensor([0, 0])


def inputs_of(granularity: Literal["token", "sequence"]) -> EstimatorInput:
    rewards = torch.tensor([1.0, 2.0, 3.0] if granularity == "token" else [1.0, 2.0])
    return EstimatorInput(rewards, torch.tensor([0.5, 0.5, 0.5]), LENGTHS, GROUPS)


def test_the_settings_have_the_defaults_of_the_config() -> None:
    inputs = inputs_of("token")
    assert (inputs.gamma, inputs.gae_lambda, inputs.value_lambda, inputs.length_adaptive_alpha) == (
        1.0,
        0.95,
        None,
        None,
    )
    assert inputs.parameters == {}
    assert inputs.baselines.shape == (0,)


def test_an_advantage_of_a_response_applies_to_each_of_its_tokens() -> None:
    result = estimate(lambda inputs: inputs.rewards - 1, inputs_of("sequence"), False, "sequence", "name")
    assert result.advantages.tolist() == [0.0, 1.0, 1.0]
    assert result.returns.tolist() == [0.0, 0.0, 0.0]


def test_advantages_of_tokens_are_those_of_the_estimator() -> None:
    result = estimate(lambda inputs: inputs.rewards * 2, inputs_of("token"), False, "token", "name")
    assert result.advantages.tolist() == [2.0, 4.0, 6.0]
    assert result.returns.tolist() == [0.0, 0.0, 0.0]


def test_an_estimator_with_a_critic_gives_value_targets_too() -> None:
    def estimator(inputs: EstimatorInput) -> Advantages:
        return Advantages(inputs.rewards - inputs.values, inputs.values + 1)

    result = estimate(estimator, inputs_of("token"), True, "token", "name")
    assert result.advantages.tolist() == [0.5, 1.5, 2.5]
    assert result.returns.tolist() == [1.5, 1.5, 1.5]


def test_advantages_have_no_gradient() -> None:
    scale = torch.ones(3, requires_grad=True)
    result = estimate(lambda inputs: inputs.rewards * scale, inputs_of("token"), False, "token", "name")
    assert not result.advantages.requires_grad


@pytest.mark.parametrize(
    ("result", "needs_critic", "message"),
    [
        (
            torch.zeros(3),
            True,
            r"name: returned Tensor, expected quartet\.ppo\.gae\.Advantages, as needs_critic is true",
        ),
        (
            Advantages(torch.zeros(3), torch.zeros(3)),
            False,
            "name: returned Advantages, expected a tensor of advantages",
        ),
        (None, False, "name: returned NoneType, expected a tensor of advantages"),
        (torch.zeros(2), False, r"name: advantages: \[2\] torch\.float32, expected \[3\] torch\.float32"),
        (
            torch.zeros(3, dtype=torch.float64),
            False,
            r"name: advantages: \[3\] torch\.float64, expected \[3\] torch\.float32",
        ),
        (Advantages(torch.zeros(3), torch.zeros(4)), True, r"name: returns: \[4\] torch\.float32, expected \[3\]"),
        (
            torch.tensor([0.0, torch.nan, torch.inf]),
            False,
            "name: advantages: 2 of 3 are not finite, expected finite numbers",
        ),
        (
            Advantages(torch.zeros(3), torch.tensor([0.0, 0.0, -torch.inf])),
            True,
            "name: returns: 1 of 3 are not finite",
        ),
    ],
)
def test_a_wrong_result_is_an_error_that_says_what_was_expected(result: Any, needs_critic: bool, message: str) -> None:
    with pytest.raises(ComputationFailed, match=message):
        estimate(lambda _: result, inputs_of("token"), needs_critic, "token", "name")


@pytest.mark.parametrize(
    ("min_samples", "lengths"), [(1, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3, 4, 5, 6, 7, 8, 1])]
)
@pytest.mark.parametrize("granularity", ["token", "sequence"])
@pytest.mark.parametrize("needs_greedy_baseline", [False, True])
def test_the_trial_has_responses_of_one_prompt_with_different_lengths_and_rewards(
    min_samples: int, lengths: list[int], granularity: Literal["token", "sequence"], needs_greedy_baseline: bool
) -> None:
    tried: list[EstimatorInput] = []

    def estimator(inputs: EstimatorInput) -> Tensor:
        tried.append(inputs)
        return inputs.rewards

    check_estimator(estimator, False, granularity, min_samples, "name", {"bonus": 2.0}, needs_greedy_baseline)
    (inputs,) = tried
    samples, tokens = len(lengths), sum(lengths)
    assert inputs.lengths.tolist() == lengths
    assert inputs.groups.tolist() == [0] * samples
    assert inputs.values.tolist() == [0.0] * tokens
    assert inputs.rewards.tolist() == torch.linspace(-1, 1, tokens if granularity == "token" else samples).tolist()
    assert inputs.baselines.tolist() == [0.0] * (samples if needs_greedy_baseline else 0)
    assert inputs.parameters == {"bonus": 2.0}


def test_the_trial_has_no_greedy_baseline_unless_the_estimator_needs_it() -> None:
    def estimator(inputs: EstimatorInput) -> Tensor:
        assert inputs.baselines.shape == (0,)
        return inputs.rewards

    check_estimator(estimator, False, "token", 1, "name", {})


def test_an_estimator_that_fails_in_the_trial_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"name: advantages: \[1\] .* \(in a trial with 4 responses\)"):
        check_estimator(lambda _: torch.zeros(1), False, "sequence", 4, "name", {})
    with pytest.raises(ConfigError, match="name: a trial with 2 responses failed: ZeroDivisionError"):
        check_estimator(lambda _: torch.zeros(1 // 0), False, "sequence", 1, "name", {})
