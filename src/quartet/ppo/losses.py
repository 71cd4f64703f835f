"""The losses of one micro-batch, each a weighted sum over its tokens.

``loss_weights`` sets the weights over a whole mini-batch, whose token count (or sequences) they are divided by. So the
micro-batches' losses, and their gradients, add up to the mini-batch's, however its responses are split (numerics item
11). A token of weight 0 has no part in a loss: not even a NaN there reaches a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, assert_never

import torch
from torch import Tensor

from quartet.errors import ComputationFailed, ConfigError, InvalidRequest, QuartetError
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.kl import LOG_RATIO_LIMIT, kl_estimate
from quartet.ppo.ragged import check_flat, sequence_sum
from quartet.user_code import describe

Aggregation = Literal["token_mean", "sequence_mean"]
RatioLevel = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss`` [] carries the gradient. ``clipped_tokens`` [] and ``approx_kl_sum`` [] (nats) are sums, without one."""

    loss: Tensor
    clipped_tokens: Tensor
    approx_kl_sum: Tensor


PolicyLossFunction = Callable[..., PolicyLoss]
"""A policy loss with the parameters of ``policy_loss``, which are given by position up to ``lengths`` and by name after it."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``loss`` [] carries the gradient. ``clipped_tokens`` [] is a sum, without one."""

    loss: Tensor
    clipped_tokens: Tensor


@torch.no_grad()
def loss_weights(mask: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """The weight of each token in the loss of a whole mini-batch: [tokens], [sequences] -> [tokens], in mask's dtype.

    A token counts where ``mask`` is not 0. token_mean: one over the number of tokens that count. sequence_mean: one over
    the tokens of its sequence that count, times the sequences that have any. They add up to 1, or to 0 where none
    counts. Sources: Yu et al. 2025 (DAPO), section 3.3; numerics item 11. Raises InvalidRequest.
    """
    check_flat(mask=mask)
    keep = (mask != 0).double()
    kept = sequence_sum(keep, lengths)
    match aggregation:
        case "token_mean":
            shares = torch.ones_like(kept) / kept.sum().clamp(min=1)
        case "sequence_mean":
            shares = 1 / (kept.clamp(min=1) * (kept > 0).sum().clamp(min=1))
        case _:
            assert_never(aggregation)
    return (keep * broadcast_to_tokens(shares, lengths)).to(mask.dtype)


@torch.no_grad()
def importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """Trainer over engine, min(exp(old_log_probs - rollout_log_probs), cap): [tokens], [tokens] -> [tokens].

    The exponent is clamped to +-20. No gradient flows. Source: Ionides 2008 (truncated importance sampling); numerics
    item 18. Raises InvalidRequest.
    """
    check_flat(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if not cap > 0:
        raise InvalidRequest(f"importance cap {cap}: expected more than 0")
    log_ratio = (old_log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values times weights over the tokens whose weight is not 0: [tokens], [tokens] -> [].

    Raises InvalidRequest.
    """
    check_flat(values=values, weights=weights)
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    lengths: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    ratio_level: RatioLevel,
) -> PolicyLoss:
    """The clipped surrogate loss, summed over tokens by their ``weights``.

    Per token -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); where A < 0 and ``dual_clip`` c is not 0, at most
    -c A. At level "token" ratio = exp(log_probs - old_log_probs); at level "sequence" all tokens of a response have one
    ratio, the exponential of the sum of those differences over its tokens of weight not 0. Either exponent is clamped to
    +-20. So at level "sequence" a response whose tokens share one advantage has one term, which weighs as its tokens do
    together: the same for every response under sequence_mean, by its tokens under token_mean. Sources: Schulman et al.
    2017, equation 7; Ye et al. 2020, equation 5 (dual clip); Ahmadian et al. 2024 (whole responses); numerics items 7,
    11, 12 and 17.

    All tensors [tokens] but ``lengths`` [sequences], which only level "sequence" looks at. Truncated importance sampling
    is the caller's: its weights times ``weights``. ``clipped_tokens`` counts the tokens whose gradient either clip
    stopped; ``approx_kl_sum`` is the k3 estimate of KL(old || new), unweighted; both over tokens of weight not 0.

    Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, weights=weights)
    if dual_clip != 0 and not dual_clip > 1:
        raise InvalidRequest(f"dual_clip {dual_clip}: expected 0 (off) or more than 1")
    keep = weights != 0
    # What the weights leave out is replaced before anything is computed, so that not even a NaN there reaches a gradient.
    log_ratio = torch.where(keep, log_probs - old_log_probs, 0.0)
    advantages = torch.where(keep, advantages, 0.0)

    exponent = (
        broadcast_to_tokens(sequence_sum(log_ratio, lengths), lengths) if ratio_level == "sequence" else log_ratio
    )
    ratio = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    per_token = torch.maximum(unclipped, clipped)
    was_clipped = clipped > unclipped
    if dual_clip != 0:
        cap = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        was_clipped = was_clipped | (per_token > cap)
        per_token = torch.minimum(per_token, cap)

    with torch.no_grad():
        approx_kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
    return PolicyLoss((per_token * weights).sum(), was_clipped.sum(), approx_kl.sum())


def checked_policy_loss(function: PolicyLossFunction, name: str) -> PolicyLossFunction:
    """A user's policy loss, each result of which is checked.

    Tries it on a few tokens first and raises ConfigError, which names it by ``name``, if that fails. Later calls raise
    ComputationFailed if the function raises or returns anything but a ``PolicyLoss`` of scalars whose ``loss`` has a gradient.
    """

    def checked(*tensors: Tensor, **settings: object) -> PolicyLoss:
        try:
            result = function(*tensors, **settings)
        except (QuartetError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # A user's function may raise anything.
            raise ComputationFailed(f"{name}: {describe(error)}") from error
        if not isinstance(result, PolicyLoss):
            raise ComputationFailed(f"{name}: returned {type(result).__name__}, expected quartet.ppo.losses.PolicyLoss")
        for part in ("loss", "clipped_tokens", "approx_kl_sum"):
            value = getattr(result, part)
            if not isinstance(value, Tensor) or value.ndim != 0:
                raise ComputationFailed(f"{name}: {part} of the result is not a scalar tensor")
        if not result.loss.requires_grad:
            raise ComputationFailed(f"{name}: loss has no gradient; compute it from log_probs without detach or item")
        return result

    lengths = torch.tensor([2, 1])
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    flat = (torch.tensor([-1.1, -2.0, -2.9]), torch.tensor([0.5, -1.0, 2.0]), torch.full((3,), 1 / 3))
    try:
        checked(log_probs, *flat, lengths, clip_low=0.2, clip_high=0.2, dual_clip=0.0, ratio_level="token")
    except (QuartetError, torch.OutOfMemoryError) as error:
        raise ConfigError(f"{error} (in a trial with 3 tokens)") from None
    return checked


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float, denominator: float) -> ValueLoss:
    """The clipped value loss, summed over all tokens, over ``denominator``, the mini-batch's token count.

    Per token 1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2); with ``value_clip`` 0 only
    the first term. All tensors [tokens]. ``clipped_tokens`` counts the tokens whose clipped term is larger; they have
    no gradient. Source: OpenAI baselines' ppo2; numerics item 12. Raises InvalidRequest.
    """
    check_flat(values=values, old_values=old_values, returns=returns)
    _check_denominator(denominator)
    if value_clip < 0:
        raise InvalidRequest(f"value_clip {value_clip}: expected 0 (off) or more")
    error = (values - returns).square()
    if value_clip == 0:
        return ValueLoss(0.5 * error.sum() / denominator, torch.zeros((), dtype=torch.long, device=values.device))
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clipped_error = (near - returns).square()
    per_token = 0.5 * torch.maximum(error, clipped_error)
    return ValueLoss(per_token.sum() / denominator, (clipped_error > error).sum())


def kl_loss(log_probs: Tensor, reference_log_probs: Tensor, weights: Tensor, kind: Literal["k2", "k3"]) -> Tensor:
    """KL from the reference in nats, summed over tokens by their ``weights``: [].

    All tensors [tokens]. Not k1: its gradient has mean zero. Source: numerics item 8. Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, reference_log_probs=reference_log_probs, weights=weights)
    difference = torch.where(weights != 0, log_probs - reference_log_probs, 0.0)
    return weighted_sum(kl_estimate(difference, torch.zeros_like(difference), kind), weights)


def _check_denominator(denominator: float) -> None:
    if not denominator > 0:
        raise InvalidRequest(f"denominator {denominator}: expected the mini-batch's token count, more than 0")
