"""Advantages of groups with unusual rewards or sizes."""

from __future__ import annotations

import pytest
import torch

from quartet.errors import InvalidRequest
from quartet.ppo.critic_free_advantages import grpo_advantages, rloo_advantages


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
