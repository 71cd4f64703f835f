"""Sampling of the next token: invert the cumulative distribution at a given uniform number."""

from __future__ import annotations

import torch

from quartet.contract.generation import SamplingParameters

BLOCK = 128
"""Tokens whose probabilities a GPU adds up in one sum. It divides most vocabularies."""


def sample_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: SamplingParameters,
    greedy_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, with its log-prob in nats. ``greedy_rows`` int64 [rows] are greedy in any case.

    Shapes: logits [n, vocabulary], uniforms float64 [n, 1] -> int64 [n], float32 [n]. The token is the first whose cumulative
    probability exceeds the uniform number, so its probability is never 0. The log-probs are of the whole distribution at the
    temperature (1 when greedy), before top_k, top_p and min_p, because the trainer computes the same. NaN logits give NaN
    log-probs; the caller must check for them.
    """
    if greedy_rows is not None:
        tokens, log_probs = sample_tokens(logits, uniforms, sampling)
        tokens[greedy_rows], log_probs[greedy_rows] = _likeliest(logits[greedy_rows].float())
        return tokens, log_probs
    # Few passes over [n, vocabulary]: on a CPU each costs as much as a layer of a small model.
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    if sampling.temperature == 0:
        return _likeliest(scaled)
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weights = shifted.exp()
    kept = _truncate(weights, sampling) if sampling.top_k or sampling.top_p < 1 else weights
    if sampling.min_p:
        # The likeliest token has weight 1. Source: Nguyen et al. 2024.
        kept = kept.where(weights >= sampling.min_p, 0.0)
    draw = _draw_by_blocks if weights.is_cuda else _draw
    tokens, total = draw(kept, uniforms)
    if kept is not weights:
        total = weights.cumsum(-1, dtype=torch.float64)[:, -1:] if draw is _draw else _block_sums(weights).sum(-1, True)
    # Only NaN can give an index past the end. It is clamped, so that the caller's check reports it instead of a device assertion.
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    log_probs = shifted.gather(1, tokens) - total.log()
    return tokens.squeeze(1), log_probs.squeeze(1).float()


def sample_penalized(
    logits: torch.Tensor,
    penalized: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: SamplingParameters,
    greedy_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens from the ``penalized`` logits, with their log-probs by ``logits``, because the trainer computes the same.

    Shapes and the rest are those of ``sample_tokens``.
    """
    tokens, _ = sample_tokens(penalized, uniforms, sampling, greedy_rows)
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    if greedy_rows is not None:
        scaled = scaled.index_copy(0, greedy_rows, logits[greedy_rows].float())
    log_probs = scaled.gather(1, tokens[:, None]) - scaled.logsumexp(-1, keepdim=True)
    return tokens, log_probs.squeeze(1)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token of each row whose cumulative weight exceeds its part ``uniforms`` of the total, and the total.

    Shapes: weights [n, vocabulary], uniforms float64 [n, 1] -> int64 [n, 1], float64 [n, 1].
    """
    # float64, so that the sum does not lose thousands of tiny probabilities to rounding.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    return torch.searchsorted(cumulative, uniforms * total, right=True), total


def _draw_by_blocks(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of ``_draw`` but for rounding: find the block of a token first, then the token.

    A GPU computes the cumulative sum of a row with one block of threads, and would write a float64 for each token.
    """
    cumulative = _block_sums(weights).cumsum(-1)
    total = cumulative[:, -1:]
    target = uniforms * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=weights.shape[1] - 1)).where(columns < weights.shape[1], 0.0)
    sums = inside.cumsum(-1, dtype=torch.float64)
    # Both sums are rounded, so the rest may reach the sum of the block. Then its last token of any probability is meant.
    rest = torch.minimum(target - before, torch.nextafter(sums[:, -1:], torch.zeros_like(total)))
    return block * BLOCK + torch.searchsorted(sums, rest, right=True), total


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of blocks of ``weights`` [n, vocabulary] in float64, [n, blocks]."""
    padded = torch.nn.functional.pad(weights, (0, pads)) if (pads := -weights.shape[1] % BLOCK) else weights
    return padded.view(len(padded), -1, BLOCK).sum(-1, dtype=torch.float64)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest token of each row of ``logits`` float32 [n, vocabulary], with its log-prob: int64 [n], float32 [n]."""
    tokens = logits.argmax(-1, keepdim=True)
    log_probs = logits.gather(1, tokens) - logits.logsumexp(-1, keepdim=True)
    return tokens.squeeze(1), log_probs.squeeze(1)


def _truncate(weights: torch.Tensor, sampling: SamplingParameters) -> torch.Tensor:
    """Return ``weights`` [n, vocabulary] with 0 outside the ``top_k`` likeliest tokens and outside the nucleus of ``top_p``.

    The nucleus is the smallest set of likeliest tokens whose probability reaches top_p (Holtzman et al. 2020). Ties go to the
    lower token id.
    """
    ordered, order = weights.sort(stable=True, dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        # top_p applies to the tokens that top_k kept, as in other libraries.
        left = torch.where(keep, ordered, 0.0).to(torch.float64)
        before = left.cumsum(-1) - left
        keep &= before < sampling.top_p * left.sum(-1, keepdim=True)
    return torch.zeros_like(weights).scatter(1, order, torch.where(keep, ordered, 0.0))
