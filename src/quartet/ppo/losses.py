"""The losses of one micro-batch, each a sum over tokens divided by a denominator that the caller gives.

The denominator is the token count of the whole mini-batch, over all micro-batches and ranks. So the micro-batches'
losses, and their gradients, add up to the mini-batch's, however it is split (numerics item 11).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.kl import LOG_RATIO_LIMIT, kl_estimate
from quartet.ppo.ragged import check_flat


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """``loss`` [] carries the gradient. ``clipped_tokens`` [] and ``approx_kl_sum`` [] (nats) are sums, without one."""

    loss: Tensor
    clipped_tokens: Tensor
    approx_kl_sum: Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``loss`` [] carries the gradient. ``clipped_tokens`` [] is a sum, without one."""

    loss: Tensor
    clipped_tokens: Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    denominator: float,
) -> PolicyLoss:
    """The clipped surrogate loss, summed over the tokens whose ``mask`` is not 0, over ``denominator``.

    Per token -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) with ratio = exp(log_probs - old_log_probs), the
    exponent clamped to +-20; where A < 0 and ``dual_clip`` c is not 0, at most -c A. Sources: Schulman et al. 2017,
    equation 7; Ye et al. 2020, equation 5 (dual clip); numerics items 7, 11 and 12.

    All tensors [tokens]. ``clipped_tokens`` counts the tokens whose gradient either clip stopped; ``approx_kl_sum`` is
    the k3 estimate of KL(old || new). Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask)
    _check_denominator(denominator)
    if dual_clip != 0 and not dual_clip > 1:
        raise InvalidRequest(f"dual_clip {dual_clip}: expected 0 (off) or more than 1")
    keep = mask != 0
    # What the mask leaves out is replaced before anything is computed, so that not even a NaN there reaches a gradient.
    log_ratio = torch.where(keep, log_probs - old_log_probs, 0.0)
    advantages = torch.where(keep, advantages, 0.0)

    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
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
    return PolicyLoss(per_token.sum() / denominator, was_clipped.sum(), approx_kl.sum())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float, denominator: float) -> ValueLoss:
    """The clipped value loss, summed over all tokens, over ``denominator``.

    Per token 1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2); ``value_clip`` 0 leaves
    the first alone. All tensors [tokens]. ``clipped_tokens`` counts where the clipped term was the larger: no
    gradient there. Source: OpenAI baselines' ppo2; numerics item 12. Raises InvalidRequest.
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


def kl_loss(
    log_probs: Tensor, reference_log_probs: Tensor, mask: Tensor, kind: Literal["k2", "k3"], denominator: float
) -> Tensor:
    """KL from the reference in nats, summed over the tokens whose ``mask`` is not 0, over ``denominator``: [].

    All tensors [tokens]. Not k1: its gradient has mean zero. Source: numerics item 8. Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, reference_log_probs=reference_log_probs, mask=mask)
    _check_denominator(denominator)
    difference = torch.where(mask != 0, log_probs - reference_log_probs, 0.0)
    return kl_estimate(difference, torch.zeros_like(difference), kind).sum() / denominator


def _check_denominator(denominator: float) -> None:
    if not denominator > 0:
        raise InvalidRequest(f"denominator {denominator}: expected the mini-batch's token count, more than 0")
