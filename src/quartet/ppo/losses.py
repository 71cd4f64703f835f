"""Losses of one micro-batch, each a weighted sum over its tokens: the interface of policy losses, value loss and KL loss.

A policy loss is a function ``f(inputs: PolicyLossInput) -> PolicyLoss``. ``quartet.ppo.policy_losses`` has the built-in ones. The
config names it, ``algorithm.policy_loss: clipped``, or ``my_package.my_module:my_loss`` for a custom one.

``loss_weights`` computes the weights over a whole mini-batch. So the losses and gradients of its micro-batches add up to those of
the mini-batch, regardless of the split (numerics item 11). A token of weight 0 is ignored: even a NaN there does not reach a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

import torch
from torch import Tensor

from quartet.contract.update import LossAggregation, RatioLevel
from quartet.errors import ComputationFailed, ConfigError, InvalidRequest, QuartetError
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.kl import kl_estimate
from quartet.ppo.ragged import check_flat, sequence_sum
from quartet.system.user_code import describe


@dataclass(frozen=True, slots=True)
class PolicyLossInput:
    """Input of a policy loss: one micro-batch of whole responses. All tensors are [tokens], except ``lengths`` [sequences].

    ``log_probs`` have a gradient. ``old_log_probs`` are those of the policy before the update, ``rollout_log_probs`` those of the
    engine that sampled. ``mask``, bool: the tokens in the loss; observations and masked responses are not. ``weights``: the
    weight of each token in the mini-batch's loss, times its correction weight; 0 outside the mask and at tokens that a
    correction masks. ``selected``, bool: tokens that the loss's selection has picked from the mini-batch; None without one.
    ``parameters`` are the loss's own, see algorithm.policy_loss_parameters. The other settings are those of the config.

    Raises InvalidRequest if a tensor is not flat or has another length, or if ``dual_clip`` is in (0, 1].
    """

    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    lengths: Tensor
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    ratio_level: RatioLevel = "token"
    parameters: Mapping[str, float] = field(default_factory=dict)
    selected: Tensor | None = None

    def __post_init__(self) -> None:
        check_flat(
            log_probs=self.log_probs,
            old_log_probs=self.old_log_probs,
            rollout_log_probs=self.rollout_log_probs,
            advantages=self.advantages,
            mask=self.mask,
            weights=self.weights,
        )
        if self.mask.dtype != torch.bool:
            raise InvalidRequest(f"mask {self.mask.dtype}: expected bool")
        if self.dual_clip != 0 and not self.dual_clip > 1:
            raise InvalidRequest(f"dual_clip {self.dual_clip}: expected 0 (off) or more than 1")


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Result of a policy loss. ``loss`` [] has a gradient.

    ``clipped_tokens`` [] counts the tokens that a clip, a mask or a selection of the loss affects. ``approx_kl_sum`` [] is the k3
    estimate of KL(old || new) in nats, the sum over the tokens of the mask. Neither has a gradient.
    """

    loss: Tensor
    clipped_tokens: Tensor
    approx_kl_sum: Tensor


PolicyLossFunction = Callable[[PolicyLossInput], PolicyLoss]
"""Function of a policy loss. ``quartet.config.policy_losses`` lists the built-in ones."""


@dataclass(frozen=True, slots=True)
class SelectionInput:
    """Input of a token selection: the n tokens of a whole mini-batch in the loss, in an order that no split changes.

    ``old_log_probs`` and ``advantages`` [n]. ``parameters`` are those of the policy loss. ``order(m)`` returns a random order of
    m items, int64 [m] on the CPU, which only the seed, the step, the epoch and the mini-batch decide.
    """

    old_log_probs: Tensor
    advantages: Tensor
    parameters: Mapping[str, float]
    order: Callable[[int], Tensor]


TokenSelector = Callable[[SelectionInput], Tensor]
"""Function that selects tokens of a mini-batch: bool [n]."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``loss`` [] has a gradient. ``clipped_tokens`` [] is a sum without a gradient."""

    loss: Tensor
    clipped_tokens: Tensor


@torch.no_grad()
def loss_weights(mask: Tensor, lengths: Tensor, aggregation: LossAggregation, divisor: float = 1.0) -> Tensor:
    """Return the weight of each token in the loss of a mini-batch: [tokens], [sequences] -> [tokens], in the dtype of ``mask``.

    A token counts if its ``mask`` is not 0; all other tokens get weight 0. Weight of a counted token, with S the number of
    sequences with a counted token:

    - token_mean: 1 / (number of counted tokens). The weights add up to 1.
    - sequence_mean: 1 / (counted tokens of the sequence * S). The weights add up to 1.
    - token_sum: 1.
    - sequence_mean_token_sum: 1 / S.
    - sequence_mean_token_sum_norm: 1 / (``divisor`` * number of sequences). Masked sequences count, so that only the number of
      sequences decides the weight.

    Sources: Yu et al. 2025 (DAPO), section 3.3; Liu et al. 2025 (Dr. GRPO), appendix; verl's agg_loss; numerics item 11. Raises
    InvalidRequest.
    """
    check_flat(mask=mask)
    keep = (mask != 0).double()
    kept = sequence_sum(keep, lengths)
    match aggregation:
        case "token_mean":
            shares = torch.ones_like(kept) / kept.sum().clamp(min=1)
        case "sequence_mean":
            shares = 1 / (kept.clamp(min=1) * (kept > 0).sum().clamp(min=1))
        case "token_sum":
            shares = torch.ones_like(kept)
        case "sequence_mean_token_sum":
            shares = torch.ones_like(kept) / (kept > 0).sum().clamp(min=1)
        case "sequence_mean_token_sum_norm":
            if not divisor > 0:
                raise InvalidRequest(f"loss divisor {divisor}: expected more than 0")
            shares = torch.ones_like(kept) / (divisor * len(lengths))
        case _:
            assert_never(aggregation)
    return (keep * broadcast_to_tokens(shares, lengths)).to(mask.dtype)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of values times weights over the tokens whose weight is not 0: [tokens], [tokens] -> [].

    Raises InvalidRequest.
    """
    check_flat(values=values, weights=weights)
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def checked_policy_loss(
    function: PolicyLossFunction, name: str, parameters: Mapping[str, float] | None = None
) -> PolicyLossFunction:
    """Return a custom policy loss with a check of each result.

    The function is first called with a few tokens and ``parameters``. If this trial fails, raises ConfigError with ``name`` in
    the message. Later calls raise ComputationFailed if the function raises, or returns anything but a ``PolicyLoss`` of scalars
    whose ``loss`` has a gradient.
    """

    def checked(inputs: PolicyLossInput) -> PolicyLoss:
        try:
            result = function(inputs)
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

    trial = PolicyLossInput(
        log_probs=torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        old_log_probs=torch.tensor([-1.1, -2.0, -2.9]),
        rollout_log_probs=torch.tensor([-1.1, -2.1, -2.9]),
        advantages=torch.tensor([0.5, -1.0, 2.0]),
        mask=torch.ones(3, dtype=torch.bool),
        weights=torch.full((3,), 1 / 3),
        lengths=torch.tensor([2, 1]),
        parameters=parameters or {},
    )
    try:
        checked(trial)
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
