"""Advantages without a critic: one number per response, or the discounted return from each token on."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import check_flat, check_lengths, discounted_sum, sequence_sum

STD_EPSILON = 1e-4
"""Default addend of a group's standard deviation. It limits the advantages of a group whose rewards are nearly equal."""


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
def grpo_advantages(
    sequence_rewards: Tensor,
    groups: Tensor,
    divide_by_std: bool,
    leave_one_out: bool = False,
    epsilon: float = STD_EPSILON,
) -> Tensor:
    """Return (reward - mean) / (std + epsilon) over the samples of the same prompt: [sequences] -> [sequences].

    The standard deviation divides by n - 1. Without ``divide_by_std`` the result is Dr. GRPO's reward - mean. With
    ``leave_one_out``, mean and standard deviation of a sample are those of the prompt's other samples. Then a sample whose others
    have no standard deviation above 0 is not divided; this includes groups of 2. ``groups`` as in ``rloo_advantages``. Sources:
    Shao et al. 2024, section 4.1.2; Liu et al. 2025; epsilon 1e-4 is TRL's; leave-one-out as in NeMo-RL,
    algorithms/utils.calculate_baseline_and_std_per_prompt; numerics item 17. Raises InvalidRequest.
    """
    exact, index, sizes = _grouped(sequence_rewards, groups)
    centred = exact - (_group_sum(exact, index, sizes) / sizes)[index]
    squares = _group_sum(centred.square(), index, sizes)
    if leave_one_out:
        count = sizes[index]
        # Without a sample at distance c from the mean of n, the sum of squares falls by c^2 n / (n - 1).
        others = squares[index] - centred.square() * count / (count - 1)
        std = (others.clamp(min=0) / (count - 2).clamp(min=1)).sqrt()
        centred = centred * count / (count - 1)
        if divide_by_std:
            centred = centred / torch.where(_others_are_equal(exact, index, sizes), 1.0, std + epsilon)
        return centred.to(sequence_rewards.dtype)
    if divide_by_std:
        std = (squares / (sizes - 1)).sqrt()
        centred = centred / (std[index] + epsilon)
    return centred.to(sequence_rewards.dtype)


@torch.no_grad()
def group_mean_advantages(sequence_rewards: Tensor, groups: Tensor) -> Tensor:
    """Return rewards minus the mean over all samples of the same prompt, the sample included: [sequences] -> [sequences].

    REINFORCE++-baseline whitens the result over the tokens of the step. ``groups`` as in ``rloo_advantages``. Source: Hu 2025
    (REINFORCE++); verl, core_algos (reinforce_plus_plus_baseline); numerics item 17. Raises InvalidRequest.
    """
    return grpo_advantages(sequence_rewards, groups, divide_by_std=False)


@torch.no_grad()
def opo_advantages(sequence_rewards: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """Return rewards minus the optimal baseline of their prompt, the sum of length times reward over the sum of lengths, both
    over all samples of the prompt: [sequences] -> [sequences].

    The baseline minimizes the variance of the gradient if the squared norm of a response's gradient is proportional to its
    length. ``lengths`` [sequences] in tokens; ``groups`` as in ``rloo_advantages``. Source: Hao et al. 2025 (OPO);
    verl, core_algos (opo); numerics item 17. Raises InvalidRequest.
    """
    exact, index, sizes = _grouped(sequence_rewards, groups)
    check_flat(sequence_rewards=sequence_rewards, lengths=lengths)
    check_lengths(int(lengths.sum()), lengths)
    weights = lengths.double()
    baselines = _group_sum(weights * exact, index, sizes) / _group_sum(weights, index, sizes)
    return (exact - baselines[index]).to(sequence_rewards.dtype)


@torch.no_grad()
def discounted_returns(token_rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return the discounted return from each token on, the sum of gamma^l r(t + l) up to the response's last token: [tokens].

    ``token_rewards`` [tokens], ``lengths`` [sequences]. Other sequences in the batch do not change the bits of a sequence's
    result. Source: Hu 2025 (REINFORCE++), whose gamma is 1. Raises InvalidRequest.
    """
    check_flat(token_rewards=token_rewards)
    return discounted_sum(token_rewards.double(), lengths, gamma).to(token_rewards.dtype)


@torch.no_grad()
def remax_advantages(token_rewards: Tensor, baselines: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return the discounted return from each token on minus the baseline of its response: [tokens].

    ``token_rewards`` [tokens]; ``baselines`` and ``lengths`` [sequences]. A baseline is the score of a greedy response to the
    same prompt. Sources: Li et al. 2023 (ReMax), algorithm 1, with gamma 1; verl's compute_remax_outcome_advantage,
    whose returns include the KL penalties and whose baselines do not. Raises InvalidRequest.
    """
    check_flat(token_rewards=token_rewards)
    check_flat(baselines=baselines, lengths=lengths)
    returns = discounted_sum(token_rewards.double(), lengths, gamma)
    return (returns - broadcast_to_tokens(baselines.double(), lengths)).to(token_rewards.dtype)


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


def _others_are_equal(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Return whether all other values of each one's group are equal: bool [sequences]. Compares, because a rounded standard
    deviation of equal values may differ from 0."""
    bounds = values.new_empty(sizes.shape[0])
    low = bounds.scatter_reduce(0, index, values, "amin", include_self=False)[index]
    high = bounds.scatter_reduce(0, index, values, "amax", include_self=False)[index]
    at_low = _group_sum((values == low).double(), index, sizes)[index]
    at_high = _group_sum((values == high).double(), index, sizes)[index]
    rest = sizes[index] - 1
    return (low == high) | ((values == high) & (at_low == rest)) | ((values == low) & (at_high == rest))
