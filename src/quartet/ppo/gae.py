"""Generalized advantage estimation over ragged sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.ppo.ragged import check_flat, discounted_sum, last_token_index


@dataclass(frozen=True, slots=True)
class Advantages:
    """``advantages`` and ``returns`` (advantages + rollout-time values), both [tokens]."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, gae_lambda: float
) -> Advantages:
    """Return the advantage and the value target of every response token, both [tokens].

    A(t) = delta(t) + gamma lambda A(t+1) with delta(t) = r(t) + gamma V(t+1) - V(t). V and A are 0 after a response's last token,
    because the episode has ended. Source: Schulman et al. 2016, equations 11-12 and 16; numerics item 3.

    ``rewards`` [tokens]; ``values`` [tokens], from rollout time; ``lengths`` [sequences]. Other sequences in the batch do not
    change the bits of a sequence's result. The result has no gradient. Raises InvalidRequest.
    """
    check_flat(rewards=rewards, values=values)
    exact = values.double()
    next_values = torch.cat([exact[1:], exact.new_zeros(1)])
    next_values[last_token_index(lengths)] = 0.0
    deltas = rewards.double() + gamma * next_values - exact
    advantages = discounted_sum(deltas, lengths, gamma * gae_lambda)
    return Advantages(advantages.to(values.dtype), (advantages + exact).to(values.dtype))
