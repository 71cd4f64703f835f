"""Advantages of groups with unusual rewards or sizes."""

from __future__ import annotations

import pytest
import torch

from quartet.errors import InvalidRequest
from quartet.ppo.critic_free_advantages import (
    discounted_returns,
    group_mean_advantages,
    grpo_advantages,
    opo_advantages,
    reinforce_advantages,
    remax_advantages,
    rloo_advantages,
    sequence_rewards,
)


def test_nearly_equal_others_of_an_outlier_give_finite_advantages() -> None:
    # Rounding makes the sum of squares of the others negative in some of these groups.
    noise = torch.rand(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards = torch.tensor([1e6, 0.1, 0.1], dtype=torch.float64) + noise * 1e-6
    groups = torch.arange(200).repeat_interleave(3)
    advantages = grpo_advantages(rewards.flatten(), groups, divide_by_std=True, leave_one_out=True)
    assert torch.isfinite(advantages).all()


def test_the_first_prompt_with_one_sample_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt 3 has one sample"):
        rloo_advantages(torch.ones(4), torch.tensor([7, 5, 3, 5]))


def test_advantages_have_no_gradient_also_where_their_inputs_do() -> None:
    rewards, lengths = torch.arange(4.0, requires_grad=True), torch.tensor([1, 2, 1, 3])
    tokens, groups = torch.ones(7, requires_grad=True), torch.tensor([0, 0, 1, 1])
    results = [
        sequence_rewards(rewards, tokens, lengths, 0.1),
        reinforce_advantages(rewards),
        rloo_advantages(rewards, groups),
        grpo_advantages(rewards, groups, divide_by_std=True),
        group_mean_advantages(rewards, groups),
        opo_advantages(rewards, lengths, groups),
        discounted_returns(tokens, lengths, 0.9),
        remax_advantages(tokens, rewards, lengths, 0.9),
    ]
    assert not any(result.requires_grad for result in results)
