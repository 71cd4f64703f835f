"""Generalized advantage estimation over ragged sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.ppo.ragged import check_flat, check_lengths, discounted_sum, last_token_index


@dataclass(frozen=True, slots=True)
class Advantages:
    """``advantages`` and ``returns`` (advantages + rollout-time values), both [tokens]."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    gamma: float,
    gae_lambda: float | Tensor,
    value_lambda: float | None = None,
) -> Advantages:
    """Return the advantage and the value target of every response token, both [tokens].

    A(t) = delta(t) + gamma lambda A(t+1) with delta(t) = r(t) + gamma V(t+1) - V(t). V and A are 0 after a response's last token,
    because the episode has ended. The value target is A(t) + V(t), with ``value_lambda`` as lambda; None is ``gae_lambda``.
    Sources: Schulman et al. 2016, equations 11-12 and 16; the second lambda: Yue et al. 2025 (VAPO); numerics item 3.

    ``rewards`` [tokens]; ``values`` [tokens], from rollout time; ``lengths`` [sequences]; ``gae_lambda`` is one number, or
    float64 [sequences]. Other sequences in the batch do not change the bits of a sequence's result. The result has no gradient.
    Raises InvalidRequest.
    """
    check_flat(rewards=rewards, values=values)
    exact = values.double()
    next_values = torch.cat([exact[1:], exact.new_zeros(1)])
    next_values[last_token_index(lengths)] = 0.0
    deltas = rewards.double() + gamma * next_values - exact
    advantages = discounted_sum(deltas, lengths, gamma * gae_lambda)
    for_values = advantages if value_lambda is None else discounted_sum(deltas, lengths, gamma * value_lambda)
    return Advantages(advantages.to(values.dtype), (for_values + exact).to(values.dtype))


@torch.no_grad()
def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha l) for a response of l tokens, 0 if that is negative: [sequences] -> float64 [sequences].

    The weights of the errors in an advantage, lambda^k, then add up to about alpha l. Source: Yue et al. 2025 (VAPO), with
    alpha 0.05; the bound 0 is NeMo-RL's, algorithms/advantage_estimator.py. Raises InvalidRequest.
    """
    check_lengths(int(lengths.sum()), lengths)
    return (1 - 1 / (alpha * lengths.double())).clamp(min=0)
