"""Generalized advantage estimation, compared with its definition."""

from __future__ import annotations

import math
import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.gae import generalized_advantages, length_adaptive_lambda
from quartet.ppo.ragged import sequence_sum
from quartet.ppo.rewards import token_rewards
from tests.unit.ppo.batches import draw, ragged_lengths, seeds, split

fractions = st.floats(0, 1)


def advantages_by_definition(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    """Return A(t) = sum over l of (gamma lambda)^l delta(t + l) for one sequence."""
    length = len(rewards)
    next_values = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * next_values[t] - values[t] for t in range(length)]
    return [
        math.fsum((gamma * gae_lambda) ** (later - t) * deltas[later] for later in range(t, length))
        for t in range(length)
    ]


@given(ragged_lengths, seeds, fractions, fractions)
def test_advantages_are_the_discounted_sum_of_later_errors(
    lengths: list[int], seed: int, gamma: float, gae_lambda: float
) -> None:
    rewards, values = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths))
    result = generalized_advantages(rewards, values, torch.tensor(lengths), gamma, gae_lambda)
    expected = [
        advantage
        for r, v in zip(split(rewards, lengths), split(values, lengths), strict=True)
        for advantage in advantages_by_definition(r, v, gamma, gae_lambda)
    ]
    assert result.advantages.dtype == torch.float32
    assert result.advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    returns = [a + v for a, v in zip(expected, values.tolist(), strict=True)]
    assert result.returns.tolist() == pytest.approx(returns, rel=1e-6, abs=1e-6)


def test_a_worked_example_with_two_tokens() -> None:
    # delta = [0.1 + 0.9*0.5 - 1.0, 2.0 - 0.5] = [-0.45, 1.5]; A = [-0.45 + 0.9*0.5*1.5, 1.5]
    result = generalized_advantages(torch.tensor([0.1, 2.0]), torch.tensor([1.0, 0.5]), torch.tensor([2]), 0.9, 0.5)
    assert result.advantages.tolist() == pytest.approx([0.225, 1.5])
    assert result.returns.tolist() == pytest.approx([1.225, 2.0])


def test_a_worked_example_with_a_second_lambda_for_the_values() -> None:
    # The advantages are those of the example above. With lambda 1: A = [-0.45 + 0.9*1.5, 1.5] = [0.9, 1.5], plus V = [1.0, 0.5].
    rewards, values = torch.tensor([0.1, 2.0]), torch.tensor([1.0, 0.5])
    result = generalized_advantages(rewards, values, torch.tensor([2]), 0.9, 0.5, 1.0)
    assert result.advantages.tolist() == pytest.approx([0.225, 1.5])
    # The discounted returns: 0.1 + 0.9 * 2 and 2.
    assert result.returns.tolist() == pytest.approx([1.9, 2.0])


@given(ragged_lengths, seeds, fractions, fractions)
def test_each_response_may_have_its_own_lambda(
    lengths: list[int], seed: int, gamma: float, value_lambda: float
) -> None:
    rewards, values, sizes = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths)), torch.tensor(lengths)
    lambdas = draw(seed + 2, len(lengths)).sigmoid().double()
    together = generalized_advantages(rewards, values, sizes, gamma, lambdas, value_lambda)
    rows = zip(split(rewards, lengths), split(values, lengths), lambdas.tolist(), strict=True)
    expected = [advantage for r, v, each in rows for advantage in advantages_by_definition(r, v, gamma, each)]
    assert together.advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert torch.equal(together.returns, generalized_advantages(rewards, values, sizes, gamma, value_lambda).returns)


def test_lambda_grows_with_the_length_and_is_never_negative() -> None:
    # 1 - 1/(0.05 l): l = 40 gives 1/2, 100 gives 0.8, 2000 gives 0.99; up to 20 tokens it is 0.
    result = length_adaptive_lambda(torch.tensor([1, 20, 40, 100, 2000]), 0.05)
    assert result.dtype == torch.float64
    assert result.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.8, 0.99])


@given(ragged_lengths, ragged_lengths, seeds)
def test_other_sequences_do_not_change_the_bits_with_a_lambda_by_length(
    lengths: list[int], others: list[int], seed: int
) -> None:
    rewards, values = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths))

    def estimate(r: torch.Tensor, v: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        tensor = torch.tensor(sizes)
        return generalized_advantages(r, v, tensor, 0.99, length_adaptive_lambda(tensor, 0.5), 1.0).advantages

    nan = torch.full((sum(others),), math.nan)
    together = estimate(torch.cat([nan, rewards, nan]), torch.cat([nan, values, nan]), others + lengths + others)
    selected = slice(sum(others), sum(others) + sum(lengths))
    assert torch.equal(together[selected], estimate(rewards, values, lengths))


@given(ragged_lengths, seeds)
def test_undiscounted_returns_are_the_score_minus_later_kl_penalties(lengths: list[int], seed: int) -> None:
    kl, values = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths))
    scores, sizes = draw(seed + 2, len(lengths)), torch.tensor(lengths)
    result = generalized_advantages(token_rewards(scores, kl, sizes, 0.3), values, sizes, 1.0, 1.0)
    expected = [
        score - 0.3 * math.fsum(penalties[t:])
        for score, penalties in zip(scores.tolist(), split(kl, lengths), strict=True)
        for t in range(len(penalties))
    ]
    assert result.returns.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(ragged_lengths, seeds, fractions)
def test_with_lambda_zero_only_the_next_value_counts(lengths: list[int], seed: int, gamma: float) -> None:
    rewards, values = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths))
    result = generalized_advantages(rewards, values, torch.tensor(lengths), gamma, 0.0)
    expected = [
        r[t] + (gamma * v[t + 1] if t + 1 < len(v) else 0.0)
        for r, v in zip(split(rewards, lengths), split(values, lengths), strict=True)
        for t in range(len(r))
    ]
    assert result.returns.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(ragged_lengths, ragged_lengths, seeds)
def test_other_sequences_do_not_change_the_bits(lengths: list[int], others: list[int], seed: int) -> None:
    rewards, values = draw(seed, sum(lengths)), draw(seed + 1, sum(lengths))
    expected = generalized_advantages(rewards, values, torch.tensor(lengths), 0.99, 0.95)
    others_nan = torch.full((sum(others),), math.nan)
    together = generalized_advantages(
        torch.cat([others_nan, rewards, others_nan]),
        torch.cat([others_nan, values, others_nan]),
        torch.tensor(others + lengths + others),
        0.99,
        0.95,
    )
    selected = slice(sum(others), sum(others) + sum(lengths))
    assert torch.equal(together.advantages[selected], expected.advantages)
    assert torch.equal(together.returns[selected], expected.returns)


def test_the_value_after_the_last_token_is_zero_regardless_of_padding() -> None:
    # A short response beside a long one. If padding counted, its values would change the result.
    lengths = torch.tensor([1, 9, 2])
    result = generalized_advantages(torch.ones(12), torch.full((12,), 5.0), lengths, 0.5, 0.5)
    assert result.advantages[0].item() == 1.0 - 5.0
    assert result.advantages[-1].item() == 1.0 - 5.0
    assert sequence_sum(result.advantages, lengths).isfinite().all()


def test_targets_have_no_gradient() -> None:
    values = torch.ones(3, requires_grad=True)
    result = generalized_advantages(torch.ones(3), values, torch.tensor([3]), 1.0, 0.95)
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


def test_the_inputs_are_not_modified() -> None:
    rewards, values = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    generalized_advantages(rewards, values, torch.tensor([3]), 1.0, 0.95)
    assert rewards.tolist() == [1.0, 1.0, 1.0]
    assert values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("by_length", [False, True])
def test_a_million_tokens_are_computed_without_a_loop_over_sequences(by_length: bool) -> None:
    lengths = torch.full((1000,), 1000)
    policy_lambda = length_adaptive_lambda(lengths, 0.05) if by_length else 0.95
    rewards, values = draw(0, 1_000_000), draw(1, 1_000_000)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        generalized_advantages(rewards, values, lengths, 1.0, policy_lambda)
        seconds.append(time.process_time() - start)
    # About 0.03 s of the processor; a loop over a million tokens takes seconds.
    assert min(seconds) < 0.3


def test_mismatched_tensors_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        generalized_advantages(torch.zeros(3), torch.zeros(4), torch.tensor([3]), 1.0, 1.0)
    with pytest.raises(InvalidRequest):
        generalized_advantages(torch.zeros(3), torch.zeros(3), torch.tensor([2]), 1.0, 1.0)
