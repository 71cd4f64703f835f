"""Moments over all response tokens of a batch, and the numbers that are watched during training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import check_flat
from quartet.types import IntArray

# Keeps a constant input finite (it becomes 0, not NaN).
_VARIANCE_FLOOR = 1e-8


def whiten(values: Tensor, shift_mean: bool, mask: Tensor | None = None) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8), the mean added back unless ``shift_mean``: [tokens] -> [tokens].

    Mean and population variance (divided by the count) are taken over the tokens where ``mask`` [tokens] is not 0, all
    by default; tokens outside are transformed by the same moments. When no token defines them, values come back as they
    are. Give it the whole batch: whitening parts differs. Source: Ziegler et al. 2019 (lm-human-preferences,
    core.whiten); numerics item 10. Raises InvalidRequest.
    """
    exact = values.double()
    if mask is None:
        check_flat(values=values)
        counted = exact
    else:
        check_flat(values=values, mask=mask)
        counted = exact[mask != 0]
    if counted.numel() == 0:
        return values.clone()
    mean = counted.mean()
    whitened = (exact - mean) * torch.rsqrt(counted.var(correction=0) + _VARIANCE_FLOOR)
    return (whitened if shift_mean else whitened + mean).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over [tokens]; 1 is a perfect critic. 0 when all returns are equal.

    Raises InvalidRequest.
    """
    check_flat(values=values, returns=returns)
    exact = returns.double()
    # Equal numbers, and not a variance of 0: the rounded mean of equal numbers can differ from them.
    if exact.numel() == 0 or bool((exact == exact[0]).all()):
        return 0.0
    return 1.0 - float((exact - values.double()).var(correction=0) / exact.var(correction=0))


def repetition(token_ids: Sequence[Sequence[int] | IntArray], n: int = 3) -> float:
    """Share of a response's n-grams that repeat an earlier one of it, averaged over responses: 0..1.

    ``token_ids``: per response its ids [response tokens]. A response of fewer than n+1 tokens counts 0. Raises
    InvalidRequest.
    """
    _check_size(n)
    shares = [_repeated_share(response, n) for response in token_ids]
    return sum(shares) / len(shares) if shares else 0.0


def distinct(token_ids: Sequence[Sequence[int] | IntArray], n: int) -> float:
    """Share of different n-grams among all n-grams of all responses together: 0..1, and 0 when there are none.

    ``token_ids``: per response its ids [response tokens]; no n-gram reaches over two responses. Low when responses
    resemble each other. Source: Li et al. 2016 (distinct-n). Raises InvalidRequest.
    """
    _check_size(n)
    grams = [gram for response in token_ids for gram in _ngrams(response, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of ``a`` and ``b`` [n]: -1..1. 0 for fewer than two, or when either has no spread.

    Raises InvalidRequest.
    """
    check_flat(a=a, b=b)
    x, y = a.double(), b.double()
    # Equal numbers, and not a variance of 0: the rounded mean of equal numbers can differ from them.
    if x.numel() < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(((x * y).sum() / (x.norm() * y.norm())).clamp(-1, 1))


def slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through (0, values[0]), (1, values[1]), ...; 0 for fewer than two."""
    middle = (len(values) - 1) / 2
    # The x are whole numbers around their middle, so the mean of the values drops out.
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    # Summed exactly, so that equal values have a slope of exactly 0.
    return math.fsum((index - middle) * value for index, value in enumerate(values)) / spread if spread else 0.0


def _repeated_share(response: Sequence[int] | IntArray, n: int) -> float:
    grams = _ngrams(response, n)
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _ngrams(response: Sequence[int] | IntArray, n: int) -> list[tuple[int, ...]]:
    """Every n neighbouring ids of a response, in order."""
    ids = [int(token) for token in response]
    return list(zip(*(ids[offset:] for offset in range(n)), strict=False))


def _check_size(n: int) -> None:
    if n < 1:
        raise InvalidRequest(f"n-grams of {n} tokens: expected at least 1")
