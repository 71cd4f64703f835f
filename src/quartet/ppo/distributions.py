"""From logits to log-probs and entropies, at the sampling temperature and in at least fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quartet.errors import InvalidRequest

CACHED = 2**17
"""Numbers that a core's cache still holds when they are passed over again."""
MIN_LOG_PROB = -1e30
"""Less than that of any token whose probability is above 0 in float64."""


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    """Log-probability in nats of each token: logits [n, vocabulary], ids [n] -> [n].

    The caller aligns them: the logits at position t-1 score token t. The log-softmax of logits / temperature, the same
    temperature for rollout, old, new and reference log-probs. Source: numerics items 1, 6 and 19.

    Raises InvalidRequest.
    """
    if token_ids.shape != logits.shape[:1]:
        raise InvalidRequest(
            f"token_ids {tuple(token_ids.shape)}: expected one for each of {logits.shape[0]} logit rows"
        )
    result: Tensor = _TokenLogProbs.apply(_scaled(logits, temperature), token_ids.long()[:, None])  # type: ignore[no-untyped-call]
    return result


class _TokenLogProbs(torch.autograd.Function):
    """Log-softmax and the choice of one entry a row. Its backward pass writes the gradient of the logits at once.

    Left to themselves the two pass over [n, vocabulary] three more times: for zeros, for the entries among them, for their sum.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, dim=1)
        ctx.save_for_backward(log_probs, places)
        return log_probs.gather(1, places).squeeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probs, places = ctx.saved_tensors
        # d log p_i / d logit_j is 1 if j is i, less p_j for every j. In place, because nothing else refers to the saved
        # tensor, and new memory would take longer than the exponentials.
        # A second backward pass over the same graph raises an error.
        result = log_probs.exp_().mul_(-gradient[:, None])
        return result.scatter_add_(1, places, gradient[:, None]), None


def entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of each row's full distribution: [n, vocabulary] -> [n]. Source: numerics item 13.

    Raises InvalidRequest.
    """
    scaled = _scaled(logits, temperature)
    rows = max(1, CACHED // scaled.shape[1]) if scaled.device.type == "cpu" else max(1, len(scaled))
    return torch.cat([_entropy(some) for some in torch.split(scaled, rows)])


def _entropy(logits: Tensor) -> Tensor:
    log_probs = torch.log_softmax(logits, dim=1)
    # A token that cannot occur (logit -inf) adds 0, as p log p does in the limit; 0 * -inf would be NaN.
    return -(log_probs.exp() * log_probs.clamp(min=MIN_LOG_PROB)).sum(1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    if logits.ndim != 2:
        raise InvalidRequest(f"logits {tuple(logits.shape)}: expected [n, vocabulary]")
    if not temperature > 0:
        raise InvalidRequest(f"temperature {temperature}: expected more than 0 (greedy decoding has no log-probs)")
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # At 1 the division would cost a pass over the logits and change nothing.
    return precise if temperature == 1 else precise / temperature
