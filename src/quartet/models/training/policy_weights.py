"""Weights of the tokens in the policy loss: aggregation, and the correction for the difference between engine and trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.contract.update import PolicyLossSettings
from quartet.models.training.mini_batches import MetricSums
from quartet.ppo.losses import loss_weights
from quartet.ppo.rollout_correction import (
    geometric_mean_weights,
    importance_metrics,
    importance_weights,
    mean_weight,
    off_policy_tokens,
    rejected_tokens,
)

MASKED_SUMS = ("off_policy_masked", "rejected")
"""Sums of tokens that ``PolicyWeights.of_loss`` adds, each for a metric with the suffix _fraction."""


class PolicyWeights:
    """Weights of one step's tokens. All tensors of the step are flat [response tokens].

    Rejection changes the tokens that count in the aggregation, in the KL and in the entropy. Importance weights and off-policy
    masks change the policy loss only, and no denominator. If the old log-probs are the engine's, rejection compares the engine
    with the current policy, and changes no denominator either, because these tokens differ from pass to pass.
    """

    def __init__(
        self,
        loss: PolicyLossSettings,
        mask: Tensor,
        rollout_log_probs: Tensor,
        advantages: Tensor,
        lengths: Tensor,
        uses_geometric_mean: bool = False,
    ) -> None:
        """``mask``: tokens in the policy loss. ``lengths`` [sequences]: response tokens of each sequence of the step.

        ``uses_geometric_mean``: the importance weight of a response in the loss is the geometric mean of its tokens' weights.
        """
        self._loss, self._correction = loss, loss.rollout_correction
        self._all, self._rollout, self._advantages, self._lengths = mask, rollout_log_probs, advantages, lengths
        self._uses_geometric_mean = uses_geometric_mean
        self._from_engine = loss.old_log_probs == "rollout"
        self._weights = torch.zeros_like(mask)
        self._mean = 1.0
        self._rejected_fraction: float | None = None
        self.mask = mask
        """Tokens in the policy loss that are not rejected."""

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether ``prepare`` needs the old log-probs of the whole step before the first optimizer step."""
        correction = self._correction
        normalizes = correction.normalize and correction.level != "none"
        return not self._from_engine and (bool(correction.rejection) or normalizes)

    def prepare(self, old_log_probs: Tensor) -> None:
        """Compute what depends on the whole step: rejected tokens, and the mean of the importance weights."""
        correction = self._correction
        if correction.rejection:
            rejected = rejected_tokens(old_log_probs, self._rollout, self._all, self._lengths, correction.rejection)
            self.mask = torch.where(rejected, 0.0, self._all)
            count = int((self._all != 0).sum())
            self._rejected_fraction = int(rejected.sum()) / count if count else None
        if correction.normalize and correction.level != "none":
            # Rejected tokens count in the mean, as in verl.
            importance = importance_weights(old_log_probs, self._rollout, self._all, self._lengths, correction)
            self._mean = mean_weight(importance.weights, self._all, self._lengths, correction.level)

    def start_mini_batch(self, token_indices: Tensor, lengths: Tensor) -> None:
        """Compute the aggregation weights of a mini-batch: ``token_indices`` [n] of its response tokens, ``lengths`` [rows]."""
        loss = self._loss
        self._weights[token_indices] = loss_weights(
            self.mask[token_indices], lengths, loss.aggregation, loss.loss_divisor
        )

    def of_mean(self, token_indices: Tensor) -> Tensor:
        """Return the weights [n] of the mean over the mini-batch, for the KL and entropy terms."""
        return self._weights[token_indices]

    def of_loss(
        self, token_indices: Tensor, lengths: Tensor, old_log_probs: Tensor, log_probs: Tensor, seen: MetricSums
    ) -> Tensor:
        """Return the weights [n] of a micro-batch of whole responses in the policy loss.

        ``old_log_probs`` and ``log_probs`` [n] are those of its tokens. Tokens that are masked here are added to ``seen``. A NaN
        among the engine's log-probs that a weight, a rejection or a mask depends on gives weight NaN.
        """
        weights, correction = self._weights[token_indices], self._correction
        mask, rollout = self._all[token_indices], self._rollout[token_indices]
        if correction.level != "none":
            importance = importance_weights(old_log_probs, rollout, mask, lengths, correction).weights
            if self._mean != 1:
                importance = importance / self._mean
            if self._uses_geometric_mean:
                importance = geometric_mean_weights(importance, self.mask[token_indices], lengths)
            # Avoids 0 * NaN for masked tokens.
            weights = torch.where(weights != 0, weights * importance, 0.0)
        if correction.off_policy_mask:
            dropped = off_policy_tokens(
                log_probs.detach(), rollout, self._advantages[token_indices], mask, lengths, correction.off_policy_mask
            )
            seen.add(off_policy_masked=(dropped & (self._weights[token_indices] != 0)).sum())
            weights = torch.where(dropped, 0.0, weights)
        if correction.rejection and self._from_engine:
            rejected = rejected_tokens(log_probs.detach(), rollout, mask, lengths, correction.rejection)
            seen.add(rejected=rejected.sum())
            weights = torch.where(rejected, 0.0, weights)
        if correction.rejection or correction.off_policy_mask:
            # A statistic of NaN keeps its tokens, and without importance weights no loss need read the engine's log-probs.
            weights = torch.where((weights != 0) & rollout.isnan(), torch.nan, weights)
        return weights

    def metrics(self, old_log_probs: Tensor) -> dict[str, float]:
        """Return the metrics of the importance weights and of the rejection over the step. Unknown old log-probs are NaN."""
        importance = importance_weights(old_log_probs, self._rollout, self._all, self._lengths, self._correction)
        results = importance_metrics(importance, self._all, self._lengths, self._correction)
        if self._rejected_fraction is not None:
            results["rejected_fraction"] = self._rejected_fraction
        return results

    def masked_fractions(self) -> dict[str, str]:
        """Return the metrics of the tokens that ``of_loss`` masks, with the names of their sums."""
        correction = self._correction
        names = {"off_policy_masked": bool(correction.off_policy_mask)}
        names["rejected"] = bool(correction.rejection) and self._from_engine
        return {f"{name}_fraction": name for name, is_on in names.items() if is_on}
