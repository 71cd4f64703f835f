"""The batch on which losses and estimators are compared: ragged, with masked tokens, and with ratios that every clip reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

SAMPLES = 3
"""Responses per prompt."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One mini-batch, float64. [tokens] are the tokens of all responses, one response after the other.

    ``mask`` [tokens] is 1 for the policy's tokens and 0 for those of an environment. ``scores`` and ``greedy_scores``
    [sequences]; ``advantages`` [tokens], equal within a response; ``token_advantages`` [tokens] differ within it.
    """

    lengths: Tensor
    groups: Tensor
    mask: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    reference_log_probs: Tensor
    scores: Tensor
    greedy_scores: Tensor
    advantages: Tensor
    token_advantages: Tensor
    token_rewards: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    entropies: Tensor
    logits: Tensor
    token_ids: Tensor

    def padded(self, values: Tensor) -> Tensor:
        """Return [tokens] as [sequences, longest response], padded with 0. Differentiable."""
        present = self._present()
        return torch.zeros(present.shape, dtype=values.dtype).masked_scatter(present, values)

    def flat(self, padded: Tensor) -> Tensor:
        """Return the tokens of [sequences, longest response]: [tokens]."""
        return padded[self._present()]

    def whole(self) -> Tensor:
        """Return a mask of all tokens, padded: [sequences, longest response]."""
        return self._present().double()

    def _present(self) -> Tensor:
        return torch.arange(int(self.lengths.max())) < self.lengths[:, None]


@cache
def make_batch() -> Batch:
    """Return the batch, the same on every machine."""
    random = np.random.Generator(np.random.Philox(62))
    lengths = torch.tensor([5, 2, 7, 1, 9, 4, 3, 8, 6, 2, 10, 5])
    sequences, tokens = len(lengths), int(lengths.sum())

    def normal(scale: float, size: int | tuple[int, ...] = tokens) -> Tensor:
        return torch.from_numpy(random.normal(0, scale, size))

    def log_prob(values: Tensor) -> Tensor:
        return values.clamp(max=-0.01)

    mask = torch.ones(tokens, dtype=torch.float64)
    mask[[3, 10, 18, 19, 30, 45]] = (
        0  # At the start, in the middle and at the end of responses; no response is all masked.
    )
    old = log_prob(-normal(1.5).abs() - 0.6)
    scores = normal(1.0, sequences)
    scores[4] = scores[3]  # Two equal scores of one prompt.
    advantages = scores - scores.mean()
    return Batch(
        lengths=lengths,
        groups=torch.arange(sequences // SAMPLES).repeat_interleave(SAMPLES),
        mask=mask,
        log_probs=log_prob(old + normal(1.0)),
        old_log_probs=old,
        rollout_log_probs=log_prob(old + normal(0.4)),
        reference_log_probs=log_prob(old + normal(0.5)),
        scores=scores,
        greedy_scores=normal(1.0, sequences // SAMPLES).repeat_interleave(SAMPLES),
        advantages=advantages.repeat_interleave(lengths),
        token_advantages=normal(1.0),
        token_rewards=normal(0.3),
        values=normal(1.0),
        old_values=normal(1.0),
        returns=normal(1.0),
        entropies=normal(1.0).abs(),
        logits=normal(2.0, (tokens, 11)),
        token_ids=torch.from_numpy(random.integers(0, 11, tokens)),
    )


def with_gradient(function: Callable[[Tensor], Tensor], at: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return a scalar function's value at ``at`` [tokens], and its gradient at the tokens of the mask: [tokens]."""
    leaf = at.clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.detach(), "gradient": gradient}
