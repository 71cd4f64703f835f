"""The built-in policy losses, each a function of a ``PolicyLossInput``. ``quartet.config.policy_losses`` lists them.

Tokens of weight 0 add nothing. Even a NaN there does not reach a gradient, unless the token is in the mask and the loss has one
ratio per response, which is over the tokens in the mask. Log-ratios are clamped to +-20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.kl import LOG_RATIO_LIMIT, kl_estimate
from quartet.ppo.losses import PolicyLoss, PolicyLossInput, SelectionInput, weighted_sum
from quartet.ppo.ragged import sequence_sum

# Keeps the logarithm of the binary KL finite at probability 1.
_SMALL = 1e-8


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
    return _result(inputs, *_clipped_surrogate(inputs, _exp(log_ratio)))


def gspo(inputs: PolicyLossInput) -> PolicyLoss:
    """GSPO: the clipped surrogate loss of ``clipped``, with the length-normalised ratio of each response.

    All tokens of a response have the ratio s = exp(mean of log_probs - old_log_probs over its tokens in the mask), the geometric
    mean of the token ratios. Source: Zheng et al. 2025 (GSPO); TRL's importance_sampling_level
    "sequence".
    """
    mean = _response_mean(inputs, _log_ratio(inputs, inputs.mask))
    return _result(inputs, *_clipped_surrogate(inputs, _exp(mean)))


def gspo_token(inputs: PolicyLossInput) -> PolicyLoss:
    """GSPO-token: the value of ``gspo``, and a gradient at each token that has its own advantage.

    Ratio of a token: sg(s) exp(log_prob - sg(log_prob)), with s as in ``gspo`` and sg without a gradient. With one advantage per
    response and sequence_mean, the gradient is that of ``gspo``. Source: Zheng et al. 2025 (GSPO); verl's ``gspo``.
    """
    mean = _response_mean(inputs, _log_ratio(inputs, inputs.mask)).detach()
    log_probs = torch.where(inputs.weights != 0, inputs.log_probs, 0.0)
    ratio = _exp(mean) * (log_probs - log_probs.detach()).exp()
    return _result(inputs, *_clipped_surrogate(inputs, ratio))


def cispo(inputs: PolicyLossInput) -> PolicyLoss:
    """CISPO: -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log_prob at each token, with sg without a gradient.

    The clip limits the weight of a token's gradient and never removes it. ``clipped_tokens`` counts the tokens with a limited
    weight. ``clip_low`` 1 or more has no effect, as in TRL, which only caps the ratio. Source: MiniMax 2025 (MiniMax-M1);
    TRL's and verl's ``cispo``.
    """
    keep = inputs.weights != 0
    ratio = _exp(_log_ratio(inputs, keep)).detach()
    bounded = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return _result(inputs, -bounded * _at(keep, inputs.advantages) * _at(keep, inputs.log_probs), bounded != ratio)


def sapo(inputs: PolicyLossInput) -> PolicyLoss:
    """SAPO: -(4 / tau) sigmoid(tau (ratio - 1)) A at each token, a smooth gate in place of the clip.

    tau is the parameter ``tau_positive`` if A > 0, else ``tau_negative``. No token is clipped. Source: Gao et al. 2025 (SAPO);
    TRL's and verl's ``sapo``.
    """
    keep = inputs.weights != 0
    ratio, advantages = _exp(_log_ratio(inputs, keep)), _at(keep, inputs.advantages)
    positive, negative = inputs.parameters["tau_positive"], inputs.parameters["tau_negative"]
    tau = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    return _result(inputs, -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(keep))


def gmpo(inputs: PolicyLossInput) -> PolicyLoss:
    """GMPO: -A times the geometric mean of a response's token ratios, each clipped by itself.

    Log-ratio of a token: sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)), with d = log_prob - old_log_prob; its
    clip range is one of log-ratios. The ratio of a response is the exponential of their mean over its tokens in the mask.
    ``clipped_tokens`` counts the tokens whose log-ratio is clipped. With an importance correction, the weights of a response's
    tokens are first replaced by their geometric mean. Source: Zhao et al. 2025 (GMPO); verl's ``geo_mean``.
    """
    log_ratio, sign = _log_ratio(inputs, inputs.mask), _at(inputs.mask, inputs.advantages).sign()
    bounded = log_ratio.clamp(-inputs.clip_low, inputs.clip_high)
    was_clipped = sign * bounded < sign * log_ratio
    mean = _response_mean(inputs, sign.abs() * torch.where(was_clipped, bounded, log_ratio))
    advantages = _at(inputs.weights != 0, inputs.advantages)
    return _result(inputs, -advantages * _exp(mean), was_clipped)


def clip_cov(inputs: PolicyLossInput) -> PolicyLoss:
    """Clip-Cov: the loss of ``clipped`` without the selected tokens, see ``select_clip_cov``.

    A selected token adds neither loss nor gradient. ``clipped_tokens`` counts the selected and the clipped ones. Source: Cui et
    al. 2025 (the entropy mechanism of RL).
    """
    ratio = _exp(_log_ratio(inputs, inputs.weights != 0))
    per_token, was_clipped = _clipped_surrogate(inputs, ratio)
    selected = _selected(inputs)
    return _result(inputs, torch.where(selected, 0.0, per_token), was_clipped | selected)


def kl_cov(inputs: PolicyLossInput) -> PolicyLoss:
    """KL-Cov: -ratio A at each token, plus ppo_kl_coef |log_prob - old_log_prob| at the selected tokens, see ``select_kl_cov``.

    ``clipped_tokens`` counts the selected tokens. Source: Cui et al. 2025 (the entropy mechanism of RL).
    """
    keep, selected = inputs.weights != 0, _selected(inputs)
    log_ratio = _log_ratio(inputs, keep)
    per_token = -_at(keep, inputs.advantages) * _exp(log_ratio)
    penalty = torch.where(selected, inputs.parameters["ppo_kl_coef"] * log_ratio.abs(), 0.0)
    return _result(inputs, per_token + penalty, selected)


def dppo_tv(inputs: PolicyLossInput) -> PolicyLoss:
    """DPPO with the binary total variation: -sg(min(ratio, ratio_cap)) A log_prob at the tokens that are not masked.

    With p = exp(log_prob) and q = exp(old_log_prob), a token is masked if A > 0 and p - q > clip_high, or if A <= 0 and
    q - p > clip_low. ``clipped_tokens`` counts the masked tokens. Source: DPPO, arXiv 2602.04879; verl's ``dppo_tv``.
    """
    keep = inputs.weights != 0
    change = _at(keep, inputs.log_probs.detach()).exp() - _at(keep, inputs.old_log_probs).exp()
    is_masked = torch.where(_at(keep, inputs.advantages) > 0, change > inputs.clip_high, change < -inputs.clip_low)
    return _truncated_reinforce(inputs, is_masked)


def dppo_kl(inputs: PolicyLossInput) -> PolicyLoss:
    """DPPO with the binary KL: the loss of ``dppo_tv`` with another mask.

    With p and q as in ``dppo_tv``, the divergence is q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8)). A token is
    masked if A > 0, p > q and it exceeds clip_high, or if A <= 0, p < q and it exceeds clip_low. Source: DPPO, arXiv
    2602.04879; verl's ``dppo_kl``.
    """
    keep = inputs.weights != 0
    new, old = _at(keep, inputs.log_probs.detach()), _at(keep, inputs.old_log_probs)
    p, q = new.exp(), old.exp()
    divergence = q * (old - new) + (1 - q) * ((1 - q + _SMALL) / (1 - p + _SMALL)).log()
    is_masked = torch.where(
        _at(keep, inputs.advantages) > 0,
        (divergence > inputs.clip_high) & (p > q),
        (divergence > inputs.clip_low) & (p < q),
    )
    return _truncated_reinforce(inputs, is_masked)


@torch.no_grad()
def select_clip_cov(inputs: SelectionInput) -> Tensor:
    """Return a random choice of the tokens whose covariance is between clip_cov_lb and clip_cov_ub: bool [n].

    The covariance of a token is (log-prob - mean log-prob) (A - mean A), over the whole mini-batch. The choice has
    max(1, floor(clip_cov_ratio n)) tokens, or all of them if there are fewer. Source: Cui et al. 2025; verl's
    ``clip_cov``, which selects within a micro-batch, by the new log-probs, and among the tokens that no ratio clips. The new
    log-probs are the old ones before the first optimizer step.
    """
    covariance = _covariance(inputs)
    low, high = inputs.parameters["clip_cov_lb"], inputs.parameters["clip_cov_ub"]
    candidates = torch.nonzero((covariance > low) & (covariance < high))[:, 0]
    count = max(1, int(inputs.parameters["clip_cov_ratio"] * len(covariance)))
    chosen = candidates[inputs.order(len(candidates))[:count].to(candidates.device)]
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, chosen, True)


@torch.no_grad()
def select_kl_cov(inputs: SelectionInput) -> Tensor:
    """Return the max(1, floor(kl_cov_ratio n)) tokens with the largest covariance, see ``select_clip_cov``: bool [n].

    Source: Cui et al. 2025; verl's ``kl_cov``, which selects within a micro-batch and by the new log-probs.
    """
    covariance = _covariance(inputs)
    count = max(1, int(inputs.parameters["kl_cov_ratio"] * len(covariance)))
    chosen = covariance.argsort(descending=True, stable=True)[:count]
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill(0, chosen, True)


def _covariance(inputs: SelectionInput) -> Tensor:
    """Return the covariance of each token's log-prob and advantage, float64 [n]."""
    log_probs, advantages = inputs.old_log_probs.double(), inputs.advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


def _clipped_surrogate(inputs: PolicyLossInput, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clipped surrogate loss of ``ratio`` with the dual clip, and whether a clip is active, both [tokens]."""
    advantages = _at(inputs.weights != 0, inputs.advantages)
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    per_token = torch.maximum(unclipped, bounded)
    was_clipped = bounded > unclipped
    if inputs.dual_clip != 0:
        cap = torch.where(advantages < 0, -inputs.dual_clip * advantages, torch.inf)
        was_clipped = was_clipped | (per_token > cap)
        per_token = torch.minimum(per_token, cap)
    return per_token, was_clipped


def _truncated_reinforce(inputs: PolicyLossInput, is_masked: Tensor) -> PolicyLoss:
    """Return -sg(min(ratio, ratio_cap)) A log_prob without the masked tokens."""
    keep = inputs.weights != 0
    ratio = _exp(_log_ratio(inputs, keep)).detach().clamp(max=inputs.parameters["ratio_cap"])
    per_token = -ratio * _at(keep, inputs.advantages) * _at(keep, inputs.log_probs)
    return _result(inputs, torch.where(is_masked, 0.0, per_token), is_masked)


def _at(tokens: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` [tokens] at ``tokens``, bool [tokens], and 0 elsewhere.

    Values elsewhere are replaced before any computation, so that a NaN there does not reach a gradient.
    """
    return torch.where(tokens, values, 0.0)


def _log_ratio(inputs: PolicyLossInput, tokens: Tensor) -> Tensor:
    """Return log_probs - old_log_probs [tokens] at ``tokens``, bool [tokens], and 0 elsewhere."""
    return _at(tokens, inputs.log_probs - inputs.old_log_probs)


def _response_mean(inputs: PolicyLossInput, values: Tensor) -> Tensor:
    """Return the mean of ``values`` [tokens], which are 0 outside the mask, over each response's mask, at each token."""
    count = sequence_sum(inputs.mask.to(values.dtype), inputs.lengths).clamp(min=1)
    return broadcast_to_tokens(sequence_sum(values, inputs.lengths) / count, inputs.lengths)


def _selected(inputs: PolicyLossInput) -> Tensor:
    """Return the selected tokens, bool [tokens]. None are in the first mini-batch, unless the old log-probs come before it."""
    return torch.zeros_like(inputs.mask) if inputs.selected is None else inputs.selected


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _result(inputs: PolicyLossInput, per_token: Tensor, was_clipped: Tensor) -> PolicyLoss:
    """Return the weighted sum of ``per_token`` [tokens], the number of ``was_clipped``, and the k3 estimate."""
    with torch.no_grad():
        log_ratio = _log_ratio(inputs, inputs.mask)
        approx_kl = kl_estimate(torch.zeros_like(log_ratio), log_ratio, "k3")
        clipped_tokens = (was_clipped & (inputs.weights != 0)).sum()
    return PolicyLoss(weighted_sum(per_token, inputs.weights), clipped_tokens, approx_kl.sum())
