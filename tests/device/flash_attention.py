"""Stand-in for torch's CUDA kernel of attention to sequences of different lengths, with its restrictions.

By the source of torch 2.11 to 2.13: half precision, int32 bounds, a contiguous last dimension, head sizes of at most 256 that are
a multiple of 8, groups of heads. The causal mask ends at the last query and the last key of a sequence. Queries beyond the given
longest length are not computed. The gradients have no fixed order of summation unless the deterministic mode is strict.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FORWARD, BACKWARD = "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"
"""Names of torch's operations."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool = False,
    scale: float | None = None,
    window: list[int] | None = None,
    *_: Any,
) -> Results:
    """Return the outputs, the logarithms of the sums of weights [heads, tokens], and the unused state of a generator."""
    _check(query, key, value, query_bounds, key_bounds)
    output, sums = torch.full_like(query, torch.nan), torch.full((query.shape[1], len(query)), torch.nan)
    for queries, keys in _sequences(query_bounds, key_bounds, most_queries, most_keys):
        scores = _scores(query[queries], key[keys], causal, scale)
        own = scores.softmax(-1) @ _grouped(value[keys], query)
        output[queries], sums[:, queries] = own.transpose(0, 1).to(query.dtype), scores.logsumexp(-1)
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    _state: torch.Tensor,
    scale: float | None = None,
    window: list[int] | None = None,
) -> Results:
    """Return the gradients of query, key and value."""
    _check(query, key, value, query_bounds, key_bounds)
    results = tuple(torch.zeros_like(states) for states in (query, key, value))
    for queries, keys in _sequences(query_bounds, key_bounds, most_queries, most_keys):
        weights = _scores(query[queries], key[keys], causal, scale).softmax(-1)
        outer = gradient[queries].float().transpose(0, 1)
        of_weights = outer @ _grouped(value[keys], query).transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * _scale(query, scale)
        results[0][queries] = (of_scores @ _grouped(key[keys], query)).transpose(0, 1).to(query.dtype)
        for result, own in (
            (results[1], of_scores.transpose(1, 2) @ _grouped(query[queries], query)),
            (results[2], weights.transpose(1, 2) @ outer),
        ):
            groups = own.view(key.shape[1], -1, *own.shape[1:]).sum(1)
            result[keys] = groups.transpose(0, 1).to(result.dtype)
    return results[0], results[1], results[2]


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return float(query.shape[2] ** -0.5) if scale is None else scale


def _grouped(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return [tokens, groups, size] in float32, repeated for each head: [heads, tokens, size]."""
    return states.float().transpose(0, 1).repeat_interleave(query.shape[1] // states.shape[1], 0)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    """Return the scores of a sequence before the softmax, [heads, queries, keys]."""
    scores = query.float().transpose(0, 1) @ _grouped(key, query).transpose(1, 2) * _scale(query, scale)
    if causal:
        shown = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
        scores = scores.masked_fill(~shown, -torch.inf)
    return scores


def _sequences(
    query_bounds: torch.Tensor, key_bounds: torch.Tensor, most_queries: int, most_keys: int
) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each sequence that the kernel computes."""
    pairs = zip(pairwise(query_bounds.tolist()), pairwise(key_bounds.tolist()), strict=True)
    return [
        (slice(first, min(last, first + most_queries)), slice(start, min(end, start + most_keys)))
        for (first, last), (start, end) in pairs
    ]


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_bounds: torch.Tensor, key_bounds: torch.Tensor
) -> None:
    size = query.shape[2]
    if any(states.dtype not in (torch.float16, torch.bfloat16) for states in (query, key, value)):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(states.dtype != query.dtype or states.shape[2] != size for states in (key, value)):
        raise RuntimeError("query, key and value must have the same dtype and head size")
    if any(bounds.dtype != torch.int32 or not bounds.is_contiguous() for bounds in (query_bounds, key_bounds)):
        raise RuntimeError("cu_seqlens must have dtype int32, and be contiguous")
    if any(states.stride(-1) != 1 for states in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if size > 256 or size % 8:
        raise RuntimeError("head_size must be a multiple of 8 and at most 256")
    if query.shape[1] % key.shape[1] or key.shape != value.shape:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if len(query_bounds) != len(key_bounds) or len(query_bounds) < 2:
        raise RuntimeError("batch size must be positive")
