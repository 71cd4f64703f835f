"""Random ragged batches, and helpers for definitions in plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor

ragged_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8)
seeds = st.integers(0, 2**32 - 1)


def draw(seed: int, tokens: int, scale: float = 1.0) -> Tensor:
    """Return normally distributed values, float32 [tokens]."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, tokens).astype(np.float32))


def draw_mask(seed: int, tokens: int) -> Tensor:
    """Return a mask of 0 and 1 with at least one 1, float32 [tokens]."""
    mask = np.random.default_rng(seed).integers(0, 2, tokens).astype(np.float32)
    mask[seed % tokens] = 1.0
    return torch.from_numpy(mask)


def split(values: Tensor, lengths: Sequence[int]) -> list[list[float]]:
    """Return the flat values as one list per sequence."""
    flat, sequences, start = values.tolist(), [], 0
    for length in lengths:
        sequences.append(flat[start : start + length])
        start += length
    assert start == len(flat)
    return sequences


def gradient(function: Callable[[Tensor], Tensor], at: Tensor) -> list[float]:
    """Return the gradient of a scalar function at ``at``."""
    leaf = at.clone().requires_grad_()
    function(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()
