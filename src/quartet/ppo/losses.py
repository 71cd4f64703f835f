"""Losses of one micro-batch, each a weighted sum over its tokens.

``loss_weights`` computes the weights over a whole mini-batch. So the losses and gradients of its micro-batches add up to those of
the mini-batch, regardless of the split (numerics item 11). A token of weight 0 is ignored: even a NaN there does not reach a
gradient.
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
    """``loss`` [] has a gradient. ``clipped_tokens`` [] and ``approx_kl_sum`` [] (nats) are sums without a gradient."""

    loss: Tensor
    clipped_tokens: Tensor
    approx_kl_sum: Tensor


PolicyLossFunction = Callable[..., PolicyLoss]
"""Function with the parameters of ``policy_loss``. It is called with positional arguments up to ``lengths``, and keywords after
it.
"""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``loss`` [] has a gradient. ``clipped_tokens`` [] is a sum without a gradient."""

    loss: Tensor
    clipped_tokens: Tensor


@torch.no_grad()
def loss_weights(mask: Tensor, lengths: Tensor, aggregation: Aggregation) -> Tensor:
    """Return the weight of each token in the loss of a mini-batch: [tokens], [sequences] -> [tokens], in the dtype of ``mask``.

    A token counts if its ``mask`` is not 0; all other tokens get weight 0. token_mean: 1 / (number of counted tokens).
    sequence_mean: 1 / (counted tokens of the sequence * sequences with a counted token). The weights add up to 1, or to 0 if no
    token counts. Sources: Yu et al. 2025 (DAPO), section 3.3; numerics item 11. Raises InvalidRequest.
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
    """Return the ratio of trainer to engine, min(exp(old_log_probs - rollout_log_probs), cap): [tokens], [tokens] -> [tokens].

    The exponent is clamped to +-20. The result has no gradient. Source: Ionides 2008 (truncated importance sampling); numerics
    item 18. Raises InvalidRequest.
    """
    check_flat(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if not cap > 0:
        raise InvalidRequest(f"importance cap {cap}: expected more than 0")
    log_ratio = (old_log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of values times weights over the tokens whose weight is not 0: [tokens], [tokens] -> [].

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
    """Return the clipped surrogate loss, the sum over tokens times their ``weights``.

    Loss of a token: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A). If A < 0 and ``dual_clip`` c is not 0, it is at
    most -c A. At level "token", ratio = exp(log_probs - old_log_probs). At level "sequence", all tokens of a response have the
    same ratio, the exponential of the sum of these differences over its tokens of nonzero weight. Both exponents are clamped to
    +-20. If the tokens of a response share one advantage, level "sequence" has one term per response. Under sequence_mean every
    term has the same weight; under token_mean its weight grows with the response's tokens. Sources: Schulman et al. 2017,
    equation 7; Ye et al. 2020, equation 5 (dual clip); Ahmadian et al. 2024 (whole responses); numerics items 7, 11, 12 and 17.

    All tensors are [tokens], except ``lengths`` [sequences], which only level "sequence" reads. Tokens of observations have
    weight 0. For truncated importance sampling, the caller multiplies ``weights`` by ``importance_weights``. ``clipped_tokens``
    counts the tokens whose gradient is 0 because of a clip. ``approx_kl_sum`` is the unweighted k3 estimate of KL(old || new),
    in nats. Both cover the tokens of nonzero weight.

    Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, weights=weights)
    if dual_clip != 0 and not dual_clip > 1:
        raise InvalidRequest(f"dual_clip {dual_clip}: expected 0 (off) or more than 1")
    keep = weights != 0
    # Values of tokens with weight 0 are replaced first, so that even a NaN there does not reach a gradient.
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
    """Return a custom policy loss with a check of each result.

    The function is first called with a few tokens. If this trial fails, raises ConfigError with ``name`` in the message. Later
    calls raise ComputationFailed if the function raises, or returns anything but a ``PolicyLoss`` of scalars whose ``loss`` has a
    gradient.
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
    """Return the clipped value loss: the sum over all tokens, divided by ``denominator``, the token count of the mini-batch.

    Loss of a token: 1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2); with ``value_clip`` 0 only the
    first term. All tensors are [tokens]. ``clipped_tokens`` counts the tokens whose clipped term is larger; they have no
    gradient. Source: OpenAI baselines' ppo2; numerics item 12. Raises InvalidRequest.
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
    """Return the KL from the reference in nats, the sum over tokens times their ``weights``: [].

    All tensors are [tokens]. ``kind`` cannot be k1, because the mean of its gradient is 0. Source: numerics item 8. Raises
    InvalidRequest.
    """
    check_flat(log_probs=log_probs, reference_log_probs=reference_log_probs, weights=weights)
    difference = torch.where(weights != 0, log_probs - reference_log_probs, 0.0)
    return weighted_sum(kl_estimate(difference, torch.zeros_like(difference), kind), weights)


def _check_denominator(denominator: float) -> None:
    if not denominator > 0:
        raise InvalidRequest(f"denominator {denominator}: expected the mini-batch's token count, more than 0")
