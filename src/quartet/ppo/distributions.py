"""From logits to log-probs and entropies, at the sampling temperature and in at least fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quartet.errors import InvalidRequest

CACHED = 2**17
"""Number of float values that stay in a core's cache between two passes."""
MIN_LOG_PROB = -1e30
"""A log-prob below that of any token whose probability is above 0 in float64."""


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Return the log-prob of each token, in nats: logits [n, vocabulary], ids [n] -> [n].

    The result is the log-softmax of logits / temperature at the token. The caller aligns logits and tokens: the logits at
    position t-1 score token t. Rollout, old, new and reference log-probs use the same temperature. Source: numerics items 1, 6
    and 19.

    Raises InvalidRequest.
    """
    if token_ids.shape != logits.shape[:1]:
        raise InvalidRequest(
            f"token_ids {tuple(token_ids.shape)}: expected one for each of {logits.shape[0]} logit rows"
        )
    result: Tensor = _TokenLogProbs.apply(_scaled(logits, temperature), token_ids.long()[:, None])  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    """Log-softmax at one entry per row, with a backward pass that computes the gradient of the logits in place.

    As two separate operations, autograd would make three more passes over [n, vocabulary].
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, dim=1)
        ctx.save_for_backward(log_probs, indices)
        return log_probs.gather(1, indices).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probs, indices = ctx.saved_tensors
        # d log p_i / d logit_j is 1 - p_j for j = i, and -p_j otherwise. In place, because nothing else uses the saved tensor,
        # and an allocation would take longer than the exponentials. A second backward pass over the same graph raises an error.
        result = log_probs.exp_().mul_(-gradient[:, None])
        return result.scatter_add_(1, indices, gradient[:, None]), None


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy of each row's full distribution, in nats: [n, vocabulary] -> [n]. Source: numerics item 13.

    Raises InvalidRequest.
    """
    scaled = _scaled(logits, temperature)
    rows = max(1, CACHED // scaled.shape[1]) if scaled.device.type == "cpu" else max(1, len(scaled))
    return torch.cat([_entropy(some) for some in torch.split(scaled, rows)])


def _entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, dim=1)
    # A token with logit -inf adds 0, the limit of p log p; 0 * -inf would be NaN.
    return -(log_probs.exp() * log_probs.clamp(min=MIN_LOG_PROB)).sum(1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    if logits.ndim != 2:
        raise InvalidRequest(f"logits {tuple(logits.shape)}: expected [n, vocabulary]")
    if not temperature > 0:
        raise InvalidRequest(f"temperature {temperature}: expected more than 0 (greedy decoding has no log-probs)")
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Skipped at temperature 1, because the division would cost a pass over the logits.
    return precise if temperature == 1 else precise / temperature
