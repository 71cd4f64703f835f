"""Correction for the difference between the policy that sampled the responses and the one that is trained.

The sampling (behavior) policy differs from the trainer's policy at the start of the update (the old or proximal policy), because
the engine rounds in another way or has older weights. All functions take flat [tokens] tensors with ``lengths`` [sequences], see
``quartet.ppo``. ``mask`` [tokens] is not 0 at the tokens of the policy loss. Statistics of a sequence are computed in float64
from its own tokens only, so the split into micro-batches and ranks does not change their bits. No result has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.contract.update import CorrectionLevel, RejectionRule, RolloutCorrection
from quartet.errors import InvalidRequest
from quartet.ppo.critic_free_advantages import broadcast_to_tokens
from quartet.ppo.kl import LOG_RATIO_LIMIT
from quartet.ppo.ragged import check_flat, sequence_sum

_MIN_MEAN = 1e-8
# Keeps the logarithm of a weight of 0 finite.
_MIN_WEIGHT = 1e-10


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Importance weights of a batch, both [tokens] and 0 outside the mask.

    ``ratios``: trainer to engine, before the bounds. ``weights``: after the bounds.
    """

    ratios: Tensor
    weights: Tensor


@torch.no_grad()
def importance_ratios(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor, level: CorrectionLevel
) -> Tensor:
    """Return the probability ratio of the old policy to the engine at each token: [tokens], in the dtype of ``old_log_probs``.

    With d = old_log_probs - rollout_log_probs: level "token" is exp(d), "sequence" the product exp(sum d) over the tokens of the
    response under the mask, "geometric_mean" exp(mean d), "none" 1. The exponent is clamped to +-20. Tokens outside the mask are
    0. Sources: verl 0.9.1, ``compute_rollout_correction_weights`` (token, sequence); AReaL, ``apply_rejection_sampling``
    (geometric mean); numerics item 18. Raises InvalidRequest.
    """
    check_flat(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    keep = mask != 0
    if level == "none":
        return keep.to(old_log_probs.dtype)
    if level == "token":
        exponent = old_log_probs - rollout_log_probs
    else:
        total = sequence_sum(torch.where(keep, old_log_probs.double() - rollout_log_probs.double(), 0.0), lengths)
        if level == "geometric_mean":
            total = total / _counts(keep, lengths)
        exponent = broadcast_to_tokens(total, lengths)
    ratios = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.where(keep, ratios, 0.0).to(old_log_probs.dtype)


@torch.no_grad()
def importance_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor, correction: RolloutCorrection
) -> ImportanceWeights:
    """Return the importance ratios at ``correction.level`` and the weights that its treatment makes of them.

    - truncate: min(max(ratio, lower), upper). Source: Ionides 2008 (truncated importance sampling).
    - mask: the ratio if lower <= ratio <= upper, else 0. Source: IcePop; TRL 1.16, modes token_mask and sequence_mask.
    - seq_mask: the ratio if the geometric mean of the response's ratios lies within the bounds, else 0. Source: seq-mask-tis of
      NeMo-RL and OpenRLHF, whose level is "token".

    A bound of 0 is off. A ratio of NaN stays NaN, so that the loss shows the error. Raises InvalidRequest.
    """
    _check_bounds(correction)
    ratios = importance_ratios(old_log_probs, rollout_log_probs, mask, lengths, correction.level)
    if correction.level == "none":
        return ImportanceWeights(ratios, ratios)
    lower, upper = correction.lower, correction.upper or torch.inf
    if correction.treatment == "truncate":
        return ImportanceWeights(ratios, torch.where(mask != 0, ratios.clamp(lower, upper), 0.0))
    bounded = ratios
    if correction.treatment == "seq_mask":
        bounded = importance_ratios(old_log_probs, rollout_log_probs, mask, lengths, "geometric_mean")
    return ImportanceWeights(ratios, torch.where((bounded < lower) | (bounded > upper), 0.0, ratios))


@torch.no_grad()
def mean_weight(weights: Tensor, mask: Tensor, lengths: Tensor, level: CorrectionLevel) -> float:
    """Return the mean of the importance ``weights`` [tokens], by which a batch is normalized.

    At level "token" it is the mean over the tokens under the mask, at the others the mean over the responses. Weights that are
    not finite do not count. 1 if the mean is at most 1e-8 or no weight counts. Source: verl 0.9.1, rollout_is_batch_normalize.
    Raises InvalidRequest.
    """
    units = _units(weights, mask, lengths, level)
    mean = float(units.mean()) if units.numel() else 0.0
    return mean if mean > _MIN_MEAN else 1.0


@torch.no_grad()
def geometric_mean_weights(weights: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the geometric mean of each response's ``weights`` over its tokens under the mask: [tokens], 0 outside the mask.

    It is for losses whose ratio is the geometric mean of token ratios. 1e-10 is added to each weight, so a weight of 0 makes the
    mean small and not 0. Source: verl 0.9.1, ``compute_policy_loss_geo_mean``. Raises InvalidRequest.
    """
    check_flat(weights=weights, mask=mask)
    keep = mask != 0
    logs = torch.where(keep, weights.double() + _MIN_WEIGHT, 1.0).log()
    means = broadcast_to_tokens(_over_sequences(logs, keep, lengths, "seq_mean"), lengths).exp()
    return torch.where(keep, means, 0.0).to(weights.dtype)


@torch.no_grad()
def rejected_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, lengths: Tensor, rules: Sequence[RejectionRule]
) -> Tensor:
    """Return the tokens under the mask that at least one rule rejects: bool [tokens].

    With d = old_log_probs - rollout_log_probs, clamped to +-20, a statistic is computed from k1 = -d, k2 = d^2/2 or
    k3 = exp(d) - 1 - d of each token: "token_k" is that number, "seq_sum_k", "seq_mean_k" and "seq_max_k" are the sum, mean and
    maximum over the tokens of the response under the mask. k1 must lie within [log lower, log upper]; lower 0 means 1/upper.
    k2 and k3 must be at most upper. Statistics of sequences reject whole responses. NaN rejects nothing; the caller must make the
    loss show the error. Source: verl 0.9.1, ``compute_rollout_rejection_mask``. Raises InvalidRequest.
    """
    check_flat(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, mask=mask)
    keep = mask != 0
    log_ratio = torch.where(keep, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rejected = torch.zeros_like(keep)
    for rule in rules:
        _check_rule(rule)
        unit, _, kind = rule.statistic.rpartition("_")
        values = _divergence(log_ratio, kind)
        if unit != "token":
            values = broadcast_to_tokens(_over_sequences(values, keep, lengths, unit), lengths)
        if kind == "k1":
            lower, upper = torch.tensor([rule.lower or 1 / rule.upper, rule.upper], dtype=torch.float64).log().tolist()
            rejected |= (values < lower) | (values > upper)
        else:
            rejected |= values > rule.upper
    return rejected & keep


@torch.no_grad()
def off_policy_tokens(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    lengths: Tensor,
    threshold: float,
) -> Tensor:
    """Return the tokens that off-policy sequence masking drops: bool [tokens].

    These are the tokens of negative advantage in the responses whose mean of rollout_log_probs - log_probs over the tokens under
    the mask is above ``threshold`` (nats per token). ``log_probs`` are those of the current policy. If the tokens of a response
    share one advantage, all or none of them are dropped. A mean of NaN drops nothing; the caller must make the loss show
    the error. Sources: DeepSeek-V3.2, equation 9; TRL 1.16, ``get_off_policy_mask``. Raises InvalidRequest.
    """
    check_flat(log_probs=log_probs, rollout_log_probs=rollout_log_probs, advantages=advantages, mask=mask)
    keep = mask != 0
    divergence = torch.where(keep, rollout_log_probs.double() - log_probs.double(), 0.0)
    mean = broadcast_to_tokens(_over_sequences(divergence, keep, lengths, "seq_mean"), lengths)
    return keep & (advantages < 0) & (mean > threshold)


@torch.no_grad()
def importance_metrics(
    importance: ImportanceWeights, mask: Tensor, lengths: Tensor, correction: RolloutCorrection
) -> dict[str, float]:
    """Return metrics of the weights of a batch, over the tokens under the mask whose ratio is finite. Empty if there is none.

    ``importance_weight``: mean weight. ``importance_weight_max``: largest ratio, before the bounds. ``importance_ess``: effective
    sample size (sum w)^2 / (n sum w^2), a share of the tokens, or of the responses if they have one weight each.
    ``importance_truncated_fraction`` or, for the treatments that mask, ``importance_masked_fraction``: share of the tokens whose
    weight a bound changed. With level "none" only ``importance_weight``, which is 1. Sources: Kong 1992 (effective sample size);
    verl 0.9.1, ``compute_is_metrics``. Raises InvalidRequest.
    """
    known = (mask != 0) & importance.ratios.isfinite()
    if correction.level == "none":
        return {"importance_weight": 1.0}
    if not known.any():
        return {}
    ratios, weights = importance.ratios[known].double(), importance.weights[known].double()
    changed = "truncated" if correction.treatment == "truncate" else "masked"
    return {
        "importance_weight": float(weights.mean()),
        "importance_weight_max": float(ratios.max()),
        "importance_ess": _effective_sample_size(_units(importance.weights, mask, lengths, correction.level)),
        f"importance_{changed}_fraction": float((weights != ratios).double().mean()),
    }


def _effective_sample_size(weights: Tensor) -> float:
    """Return (sum w)^2 / (n sum w^2): 1 for equal weights, 1/n if one weight has everything, 0 if all are 0."""
    squares = float(weights.square().sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0


def _units(weights: Tensor, mask: Tensor, lengths: Tensor, level: CorrectionLevel) -> Tensor:
    """Return the finite weights under the mask, one per token or one per response, float64."""
    check_flat(weights=weights, mask=mask)
    keep = (mask != 0) & weights.isfinite()
    if level in ("none", "token"):
        return weights[keep].double()
    # All tokens of a response have the same weight.
    means = _over_sequences(torch.where(keep, weights.double(), 0.0), keep, lengths, "seq_mean")
    return means[sequence_sum(keep.double(), lengths) > 0]


def _divergence(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if kind == "k2" else torch.expm1(log_ratio) - log_ratio


def _over_sequences(values: Tensor, keep: Tensor, lengths: Tensor, unit: str) -> Tensor:
    """Return the sum, mean or maximum of the kept values of each sequence: [tokens] -> [sequences]. 0 if none is kept."""
    if unit == "seq_max":
        maxima: Tensor = torch.segment_reduce(
            torch.where(keep, values, -torch.inf), "max", lengths=lengths.long(), axis=0
        )
        return torch.where(maxima == -torch.inf, 0.0, maxima)
    sums = sequence_sum(torch.where(keep, values, 0.0), lengths)
    return sums if unit == "seq_sum" else sums / _counts(keep, lengths)


def _counts(keep: Tensor, lengths: Tensor) -> Tensor:
    """Return the number of kept tokens of each sequence, at least 1: float64 [sequences]."""
    return sequence_sum(keep.double(), lengths).clamp(min=1)


def _check_bounds(correction: RolloutCorrection) -> None:
    lower, upper = correction.lower, correction.upper
    if not (lower >= 0 and upper >= 0 and (upper == 0 or lower <= upper)):
        raise InvalidRequest(
            f"bounds {lower} and {upper} of importance weights: expected 0 (off) or 0 < lower <= upper"
        )


def _check_rule(rule: RejectionRule) -> None:
    lower = rule.lower or (1 / rule.upper if rule.upper > 0 else 0.0)
    if not (rule.upper > 0 and rule.lower >= 0 and (not rule.statistic.endswith("k1") or lower <= rule.upper)):
        raise InvalidRequest(
            f"rejection by {rule.statistic} with bounds {rule.lower} and {rule.upper}: expected 0 < lower <= upper, or no lower "
            "bound"
        )
