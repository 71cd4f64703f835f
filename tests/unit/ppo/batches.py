"""Random ragged batches, and the definitions that the tests compare with: plain Python, one sequence and token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

check = settings(max_examples=50, deadline=None, derandomize=True)

ragged_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8)
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, tokens: int, scale: float = 1.0) -> Tensor:
    """float32 [tokens]."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, tokens).astype(np.float32))


def draw_mask(seed: int, tokens: int) -> Tensor:
    """float32 [tokens] of 0 and 1, with at least one 1."""
    mask = np.random.default_rng(seed).integers(0, 2, tokens).astype(np.float32)
    mask[seed % tokens] = 1.0
    return torch.from_numpy(mask)


def split(values: Tensor, lengths: Sequence[int]) -> list[list[float]]:
    """The flat values as one list per sequence, cut by hand."""
    flat, sequences, start = values.tolist(), [], 0
    for length in lengths:
        sequences.append(flat[start : start + length])
        start += length
    assert start == len(flat)
    return sequences


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> list[float]:
    """d function / d at, for a function with a scalar value."""
    leaf = at.clone().requires_grad_()
    function(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()
