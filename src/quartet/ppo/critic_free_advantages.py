"""Advantages without a critic: one number per response, or the discounted return from each token on."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import check_flat, check_lengths, discounted_sum, sequence_sum

# Limits the advantages of a group whose rewards are nearly equal.
_STD_FLOOR = 1e-4


@torch.no_grad()
def sequence_rewards(scores: Tensor, kl: Tensor, lengths: Tensor, kl_coefficient: float) -> Tensor:
    """Return the score of each response minus kl_coefficient times its KL, summed over its tokens: [sequences].

    ``scores`` [sequences], ``kl`` [tokens] in nats, ``lengths`` [sequences]. Source: Ziegler et al. 2019, equation 2;
    numerics item 17. Raises InvalidRequest.
    """
    check_flat(kl=kl)
    check_flat(scores=scores, lengths=lengths)
    paid = kl_coefficient * sequence_sum(kl.double(), lengths)
    return (scores.double() - paid).to(kl.dtype)


@torch.no_grad()
def reinforce_advantages(sequence_rewards: Tensor) -> Tensor:
    """Return rewards minus their mean over the batch: [sequences] -> [sequences].

    Source: Williams 1992, with the mean as the baseline; numerics item 17. Raises InvalidRequest.
    """
    check_flat(sequence_rewards=sequence_rewards)
    exact = sequence_rewards.double()
    return (exact - exact.mean()).to(sequence_rewards.dtype)


@torch.no_grad()
def rloo_advantages(sequence_rewards: Tensor, groups: Tensor) -> Tensor:
    """Return rewards minus the mean of the other samples of the same prompt: [sequences] -> [sequences].

    ``groups`` int64 [sequences] identifies the prompt of each sequence. Groups have at least 2 sequences, in any order. Source:
    Ahmadian et al. 2024 (RLOO); numerics item 17. Raises InvalidRequest.
    """
    exact, index, sizes = _grouped(sequence_rewards, groups)
    others = (_group_sum(exact, index, sizes)[index] - exact) / (sizes[index] - 1)
    return (exact - others).to(sequence_rewards.dtype)


@torch.no_grad()
def grpo_advantages(sequence_rewards: Tensor, groups: Tensor, divide_by_std: bool) -> Tensor:
    """Return (reward - mean) / (std + 1e-4) over the samples of the same prompt: [sequences] -> [sequences].

    The standard deviation divides by n - 1. Without ``divide_by_std`` the result is Dr. GRPO's reward - mean. ``groups`` as in
    ``rloo_advantages``. Sources: Shao et al. 2024, section 4.1.2; Liu et al. 2025; the 1e-4 is TRL's; numerics item 17. Raises
    InvalidRequest.
    """
    exact, index, sizes = _grouped(sequence_rewards, groups)
    centred = exact - (_group_sum(exact, index, sizes) / sizes)[index]
    if divide_by_std:
        std = (_group_sum(centred.square(), index, sizes) / (sizes - 1)).sqrt()
        centred = centred / (std[index] + _STD_FLOOR)
    return centred.to(sequence_rewards.dtype)


@torch.no_grad()
def discounted_returns(token_rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return the discounted return from each token on, the sum of gamma^l r(t + l) up to the response's last token: [tokens].

    ``token_rewards`` [tokens], ``lengths`` [sequences]. Other sequences in the batch do not change the bits of a sequence's
    result. Source: Hu 2025 (REINFORCE++), whose gamma is 1. Raises InvalidRequest.
    """
    check_flat(token_rewards=token_rewards)
    return discounted_sum(token_rewards.double(), lengths, gamma).to(token_rewards.dtype)


def broadcast_to_tokens(per_sequence: Tensor, lengths: Tensor) -> Tensor:
    """Repeat each response's number for each of its tokens: [sequences] -> [tokens]. Differentiable. Raises InvalidRequest."""
    check_flat(per_sequence=per_sequence, lengths=lengths)
    check_lengths(int(lengths.sum()), lengths)
    return per_sequence.repeat_interleave(lengths.long())


def _grouped(sequence_rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards in float64 and the index of their group, both [sequences], and the sizes of the groups [groups]."""
    check_flat(sequence_rewards=sequence_rewards, groups=groups)
    if groups.dtype != torch.int64:
        raise InvalidRequest(f"groups {groups.dtype}: expected int64, the prompt of each sequence")
    names, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    if bool((sizes < 2).any()):
        group = int(names[sizes < 2][0])
        raise InvalidRequest(f"groups: prompt {group} has one sample; a baseline of the others needs at least 2")
    return sequence_rewards.double(), index, sizes


def _group_sum(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Return the sums of ``values`` float64 [sequences] over groups: [groups]."""
    return values.new_zeros(sizes.shape[0]).index_add(0, index, values)
