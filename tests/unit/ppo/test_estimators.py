"""Advantages without a critic, compared with their definitions."""

from __future__ import annotations

import math
import statistics

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.critic_free_advantages import (
    broadcast_to_tokens,
    discounted_returns,
    group_mean_advantages,
    grpo_advantages,
    opo_advantages,
    reinforce_advantages,
    remax_advantages,
    rloo_advantages,
    sequence_rewards,
)
from quartet.ppo.rewards import token_rewards
from tests.unit.ppo.batches import draw, gradient, ragged_lengths, seeds, split

group_sizes = st.lists(st.integers(2, 6), min_size=1, max_size=5)


def draw_groups(seed: int, sizes: list[int]) -> Tensor:
    """Return group ids in random order, int64 [sequences], for groups of these sizes."""
    names = [1000 - 7 * index for index, size in enumerate(sizes) for _ in range(size)]
    return torch.from_numpy(np.random.default_rng(seed).permutation(np.array(names, np.int64)))


def same_prompt(rewards: list[float], groups: list[int], row: int) -> list[float]:
    """Return the rewards of all samples of the row's prompt, that of the row first."""
    others = [r for index, r in enumerate(rewards) if groups[index] == groups[row] and index != row]
    return [rewards[row], *others]


@given(ragged_lengths, seeds)
def test_a_sequence_reward_is_the_score_minus_the_kl_of_the_response(lengths: list[int], seed: int) -> None:
    kl, scores = draw(seed, sum(lengths)), draw(seed + 1, len(lengths))
    expected = [score - 0.3 * math.fsum(row) for score, row in zip(scores.tolist(), split(kl, lengths), strict=True)]
    result = sequence_rewards(scores, kl, torch.tensor(lengths), 0.3)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.integers(1, 30), seeds)
def test_reinforce_compares_with_the_mean_of_the_batch(count: int, seed: int) -> None:
    rewards = draw(seed, count)
    mean = math.fsum(rewards.tolist()) / count
    assert reinforce_advantages(rewards).tolist() == pytest.approx([r - mean for r in rewards.tolist()], abs=1e-6)


@given(group_sizes, seeds)
def test_rloo_compares_each_sample_with_the_mean_of_the_other_samples(sizes: list[int], seed: int) -> None:
    groups, rewards = draw_groups(seed, sizes), draw(seed, sum(sizes), scale=3.0)
    expected = []
    for row in range(len(rewards)):
        own, *others = same_prompt(rewards.tolist(), groups.tolist(), row)
        expected.append(own - math.fsum(others) / len(others))
    assert rloo_advantages(rewards, groups).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("divide_by_std", [True, False])
@given(sizes=group_sizes, seed=seeds)
def test_grpo_follows_its_definition(divide_by_std: bool, sizes: list[int], seed: int) -> None:
    groups, rewards = draw_groups(seed, sizes), draw(seed, sum(sizes), scale=0.01)
    expected = []
    for row in range(len(rewards)):
        group = same_prompt(rewards.tolist(), groups.tolist(), row)
        scale = statistics.stdev(group) + 1e-4 if divide_by_std else 1.0
        expected.append((group[0] - statistics.fmean(group)) / scale)
    assert grpo_advantages(rewards, groups, divide_by_std).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_group_advantages_of_a_worked_example() -> None:
    # Prompt 5 has rewards 1, 3; prompt 2 has 0, 3, 6.
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 3.0, 6.0]), torch.tensor([5, 2, 5, 2, 2])
    assert rloo_advantages(rewards, groups).tolist() == pytest.approx([-2.0, -4.5, 2.0, 0.0, 4.5])
    assert grpo_advantages(rewards, groups, divide_by_std=False).tolist() == pytest.approx([-1.0, -3.0, 1.0, 0.0, 3.0])
    # Sample standard deviations: sqrt(2) and 3.
    first, second = 1 / (math.sqrt(2) + 1e-4), 3 / (3 + 1e-4)
    result = grpo_advantages(rewards, groups, divide_by_std=True).tolist()
    assert result == pytest.approx([-first, -second, first, 0.0, second], rel=1e-6)


@given(group_sizes, seeds)
def test_leave_one_out_normalizes_by_the_other_samples(sizes: list[int], seed: int) -> None:
    groups, rewards = draw_groups(seed, sizes), draw(seed, sum(sizes), scale=3.0)
    expected = []
    for row in range(len(rewards)):
        own, *others = same_prompt(rewards.tolist(), groups.tolist(), row)
        scale = statistics.stdev(others) + 1e-6 if len(others) > 1 else 1.0
        expected.append((own - statistics.fmean(others)) / scale)
    result = grpo_advantages(rewards, groups, True, leave_one_out=True, epsilon=1e-6)
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_leave_one_out_without_the_standard_deviation_is_rloo() -> None:
    groups, rewards = draw_groups(3, [4, 2, 5]), draw(3, 11, scale=3.0)
    result = grpo_advantages(rewards, groups, False, leave_one_out=True)
    assert result.tolist() == pytest.approx(rloo_advantages(rewards, groups).tolist(), abs=1e-6)


def test_leave_one_out_of_a_worked_example() -> None:
    # Prompt 1 has rewards 0, 2, 4: the others of 0 have mean 3 and standard deviation sqrt(2), those of 2 mean 2 and sqrt(8).
    # Prompt 2 has rewards 0.1, 0.1, 1: the others of 1 are equal, so its advantage 0.9 is not divided.
    rewards, groups = torch.tensor([0.0, 2.0, 4.0, 0.1, 0.1, 1.0]), torch.tensor([1, 1, 1, 2, 2, 2])
    result = grpo_advantages(rewards, groups, True, leave_one_out=True, epsilon=0.5).tolist()
    outer, unequal = 3 / (math.sqrt(2) + 0.5), -0.45 / (0.45 * math.sqrt(2) + 0.5)
    assert result == pytest.approx([-outer, 0.0, outer, unequal, unequal, 0.9], abs=1e-6)


@given(group_sizes, seeds)
def test_the_baseline_of_opo_is_weighted_by_length(sizes: list[int], seed: int) -> None:
    groups, rewards = draw_groups(seed, sizes), draw(seed, sum(sizes), scale=3.0)
    lengths = torch.from_numpy(np.random.default_rng(seed).integers(1, 50, sum(sizes)))
    expected = []
    for row in range(len(rewards)):
        same = [other for other in range(len(rewards)) if groups[other] == groups[row]]
        weighted = math.fsum(int(lengths[other]) * float(rewards[other]) for other in same)
        expected.append(float(rewards[row]) - weighted / sum(int(lengths[other]) for other in same))
    assert opo_advantages(rewards, lengths, groups).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_opo_and_the_group_mean_of_a_worked_example() -> None:
    # One prompt: rewards 1, 0, 2 of 2, 1 and 5 tokens. Optimal baseline (2 + 0 + 10) / 8 = 1.5; mean 1.
    rewards, lengths, groups = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2, 1, 5]), torch.zeros(3, dtype=torch.int64)
    assert opo_advantages(rewards, lengths, groups).tolist() == [-0.5, -1.5, 0.5]
    assert group_mean_advantages(rewards, groups).tolist() == [0.0, -1.0, 1.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, -1234.567])
def test_samples_of_equal_reward_have_zero_advantage(reward: float) -> None:
    rewards, groups = torch.full((7,), reward), torch.tensor([1, 2, 1, 2, 2, 1, 1])
    for result in (
        rloo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, divide_by_std=True),
        grpo_advantages(rewards, groups, divide_by_std=False),
        grpo_advantages(rewards, groups, divide_by_std=True, leave_one_out=True),
        group_mean_advantages(rewards, groups),
    ):
        assert result.tolist() == [0.0] * 7


@given(group_sizes, group_sizes, seeds)
def test_other_prompts_do_not_change_the_bits_of_a_group(sizes: list[int], others: list[int], seed: int) -> None:
    groups, rewards = draw_groups(seed, sizes), draw(seed, sum(sizes))
    more = torch.cat([groups, draw_groups(seed + 1, others) + 100_000])
    with_more = torch.cat([rewards, draw(seed + 1, sum(others), scale=1e4)])
    for estimate in (
        rloo_advantages,
        lambda r, g: grpo_advantages(r, g, True),
        lambda r, g: grpo_advantages(r, g, False),
        lambda r, g: grpo_advantages(r, g, True, leave_one_out=True),
        lambda r, g: opo_advantages(r, torch.arange(len(r)) + 1, g),
    ):
        assert torch.equal(estimate(with_more, more)[: len(rewards)], estimate(rewards, groups))


@given(ragged_lengths, seeds, st.floats(0, 1))
def test_discounted_returns_are_the_sum_of_later_rewards(lengths: list[int], seed: int, gamma: float) -> None:
    rewards = draw(seed, sum(lengths))
    expected = [
        math.fsum(gamma ** (later - t) * row[later] for later in range(t, len(row)))
        for row in split(rewards, lengths)
        for t in range(len(row))
    ]
    result = discounted_returns(rewards, torch.tensor(lengths), gamma)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(ragged_lengths, ragged_lengths, seeds)
def test_other_sequences_do_not_change_the_bits_of_a_return(lengths: list[int], others: list[int], seed: int) -> None:
    rewards, others_nan = draw(seed, sum(lengths)), torch.full((sum(others),), math.nan)
    expected = discounted_returns(rewards, torch.tensor(lengths), 0.99)
    together = discounted_returns(
        torch.cat([others_nan, rewards, others_nan]), torch.tensor(others + lengths + others), 0.99
    )
    assert torch.equal(together[sum(others) : sum(others) + sum(lengths)], expected)


def test_without_discount_the_first_return_is_the_sequence_reward() -> None:
    scores, kl, lengths = draw(0, 3), draw(1, 9), torch.tensor([4, 1, 4])
    returns = discounted_returns(token_rewards(scores, kl, lengths, 0.2), lengths, 1.0)
    assert returns[[0, 4, 5]].tolist() == pytest.approx(sequence_rewards(scores, kl, lengths, 0.2).tolist(), rel=1e-5)


def test_a_number_per_response_is_repeated_for_its_tokens() -> None:
    lengths = torch.tensor([2, 1, 3], dtype=torch.int32)
    assert broadcast_to_tokens(torch.tensor([1.0, 2.0, 3.0]), lengths).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert gradient(lambda x: broadcast_to_tokens(x, lengths).sum(), torch.zeros(3)) == [2.0, 1.0, 3.0]


def test_advantages_have_no_gradient() -> None:
    rewards, groups = torch.ones(4, requires_grad=True), torch.tensor([0, 0, 1, 1])
    baselines = torch.ones(1, requires_grad=True)
    result = (
        sequence_rewards(rewards, rewards, torch.ones(4, dtype=torch.long), 0.1),
        reinforce_advantages(rewards),
        rloo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, True),
        grpo_advantages(rewards, groups, True, leave_one_out=True),
        opo_advantages(rewards, torch.ones(4, dtype=torch.long), groups),
        discounted_returns(rewards, torch.tensor([4]), 1.0),
        remax_advantages(rewards, baselines, torch.tensor([4]), 1.0),
    )
    assert not any(tensor.requires_grad for tensor in result)
    assert rewards.tolist() == [1.0] * 4


def test_the_first_prompt_with_one_sample_is_refused() -> None:
    rewards, groups = torch.zeros(5), torch.tensor([4, 11, 9, 4, 10])
    with pytest.raises(InvalidRequest, match="prompt 9 has one sample"):
        rloo_advantages(rewards, groups)
    with pytest.raises(InvalidRequest, match="prompt 9"):
        grpo_advantages(rewards, groups, True)
    with pytest.raises(InvalidRequest, match="prompt 9"):
        opo_advantages(rewards, torch.ones(5, dtype=torch.int64), groups)


def test_nearly_equal_others_of_an_outlier_give_finite_advantages() -> None:
    # Rounding makes the sum of squares of the others negative in some of these groups.
    noise = torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards = (torch.tensor([1e6, 0.1, 0.1], dtype=torch.float64) + noise * 1e-6).flatten()
    groups = torch.arange(200).repeat_interleave(3)
    assert torch.isfinite(grpo_advantages(rewards, groups, True, leave_one_out=True)).all()


def test_mismatched_tensors_are_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(InvalidRequest, match="same length"):
        rloo_advantages(three, torch.tensor([1, 1]))
    with pytest.raises(InvalidRequest, match="same length"):
        opo_advantages(two, torch.tensor([1, 2, 3]), torch.tensor([1, 1]))
    with pytest.raises(InvalidRequest, match="at least one token"):
        opo_advantages(two, torch.tensor([1, 0]), torch.tensor([1, 1]))
    with pytest.raises(InvalidRequest, match="int64"):
        rloo_advantages(two, two)
    with pytest.raises(InvalidRequest, match="same length"):
        sequence_rewards(three, three, torch.tensor([1, 2]), 0.1)
    with pytest.raises(InvalidRequest, match="add up to 4"):
        sequence_rewards(two, three, torch.tensor([2, 2]), 0.1)
    with pytest.raises(InvalidRequest, match="add up to 2"):
        discounted_returns(three, torch.tensor([2]), 1.0)
    with pytest.raises(InvalidRequest, match="one-dimensional"):
        reinforce_advantages(torch.zeros(2, 2))
    with pytest.raises(InvalidRequest, match="at least one token"):
        broadcast_to_tokens(two, torch.tensor([2, 0]))


def test_remax_subtracts_the_score_of_the_greedy_response_from_the_return() -> None:
    """Two responses to one prompt, whose greedy response scored 0.5, and one to a prompt with 2."""
    lengths, baselines = torch.tensor([2, 1, 3]), torch.tensor([0.5, 0.5, 2.0])
    # Token rewards: a KL penalty of -0.1 at each token, plus the scores 1, 0 and 3 at the last tokens.
    rewards = torch.tensor([-0.1, 0.9, -0.1, -0.1, -0.1, 2.9])
    expected = [0.8 - 0.5, 0.9 - 0.5, -0.1 - 0.5, 2.7 - 2, 2.8 - 2, 2.9 - 2]
    assert remax_advantages(rewards, baselines, lengths, 1.0).tolist() == pytest.approx(expected)
    # With gamma 0.5 the first token gets -0.1 + 0.5 * 0.9.
    assert remax_advantages(rewards, baselines, lengths, 0.5)[0].item() == pytest.approx(0.35 - 0.5)


@given(ragged_lengths, seeds)
def test_remax_equals_a_loop_over_tokens(lengths: list[int], seed: int) -> None:
    rewards, baselines = draw(seed, sum(lengths)), draw(seed + 1, len(lengths))
    expected = []
    for row, baseline in zip(split(rewards, lengths), baselines.tolist(), strict=True):
        expected += [math.fsum(row[index:]) - baseline for index in range(len(row))]
    result = remax_advantages(rewards, baselines, torch.tensor(lengths), 1.0)
    assert result.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
