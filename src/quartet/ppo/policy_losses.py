"""The built-in policy losses, each a function of a ``PolicyLossInput``. ``quartet.config.policy_losses`` lists them.

Tokens of weight 0 add nothing. Even a NaN there does not reach a gradient, unless the token is in the mask and the loss has one
ratio per response, which is over the tokens in the mask. Log-ratios are clamped to +-20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.kl import LOG_RATIO_LIMIT, kl_estimate
from quartet.ppo.losses import PolicyLoss, PolicyLossInput, weighted_sum
from quartet.ppo.ragged import sequence_sum


def clipped(inputs: PolicyLossInput) -> PolicyLoss:
    """Clipped surrogate loss of PPO.

    Loss of a token: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A). If A < 0 and ``dual_clip`` c is not 0, it is at
    most -c A. At ratio_level "token", ratio = exp(log_probs - old_log_probs). At "sequence", all tokens of a response have the
    same ratio, the exponential of the sum of these differences over its tokens in the mask. If the tokens of a response share
    one advantage, "sequence" has one term per response. Under sequence_mean every term has the same weight; under token_mean its
    weight grows with the response's tokens. ``clipped_tokens`` counts the tokens whose gradient is 0 because of a clip.

    Sources: Schulman et al. 2017, equation 7; Ye et al. 2020, equation 5 (dual clip); Ahmadian et al. 2024 (whole responses);
    numerics items 7, 11, 12 and 17.
    """
    if inputs.ratio_level == "sequence":
        log_ratio = _log_ratio(inputs, inputs.mask)
        log_ratio = broadcast_to_tokens(sequence_sum(log_ratio, inputs.lengths), inputs.lengths)
    else:
        log_ratio = _log_ratio(inputs, inputs.weights != 0)
    return _clipped_surrogate(inputs, _exp(log_ratio))


def _clipped_surrogate(inputs: PolicyLossInput, ratio: Tensor) -> PolicyLoss:
    """Return the clipped surrogate loss of ``ratio`` [tokens], with the dual clip."""
    keep = inputs.weights != 0
    advantages = torch.where(keep, inputs.advantages, 0.0)
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    per_token = torch.maximum(unclipped, bounded)
    was_clipped = bounded > unclipped
    if inputs.dual_clip != 0:
        cap = torch.where(advantages < 0, -inputs.dual_clip * advantages, torch.inf)
        was_clipped = was_clipped | (per_token > cap)
        per_token = torch.minimum(per_token, cap)
    return _result(inputs, per_token, was_clipped)


def _log_ratio(inputs: PolicyLossInput, tokens: Tensor) -> Tensor:
    """Return log_probs - old_log_probs [tokens] at ``tokens``, bool [tokens], and 0 elsewhere.

    The values elsewhere are replaced before any computation, so that a NaN there does not reach a gradient.
    """
    return torch.where(tokens, inputs.log_probs - inputs.old_log_probs, 0.0)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _result(inputs: PolicyLossInput, per_token: Tensor, was_clipped: Tensor) -> PolicyLoss:
    """Return the weighted sum of ``per_token`` [tokens], the number of ``was_clipped``, and the k3 estimate."""
    with torch.no_grad():
        log_ratio = _log_ratio(inputs, inputs.mask)
        approx_kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
        clipped_tokens = (was_clipped & (inputs.weights != 0)).sum()
    return PolicyLoss(weighted_sum(per_token, inputs.weights), clipped_tokens, approx_kl.sum())
