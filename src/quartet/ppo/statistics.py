"""Whitening over all response tokens of a batch, and training diagnostics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quartet.contract.arrays import IntArray
from quartet.errors import InvalidRequest
from quartet.ppo.ragged import check_flat

# Makes a constant input 0 instead of NaN.
_VARIANCE_FLOOR = 1e-8


def whiten(values: Tensor, shift_mean: bool, mask: Tensor | None = None) -> Tensor:
    """Return (values - mean) / sqrt(variance + 1e-8), plus the mean unless ``shift_mean``: [tokens] -> [tokens].

    Mean and population variance (divided by the count) cover the tokens whose ``mask`` [tokens] is not 0. Defaults to all tokens.
    The other tokens are transformed by the same moments. If the mask has no token, the values are returned unchanged. Pass the
    whole batch, because its parts have other moments. Source: Ziegler et al. 2019 (lm-human-preferences, core.whiten); numerics
    item 10. Raises InvalidRequest.
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
    """Return 1 - Var(returns - values) / Var(returns) over [tokens]: 1 for a perfect critic, 0 if all returns are equal.

    Raises InvalidRequest.
    """
    check_flat(values=values, returns=returns)
    exact = returns.double()
    # Compare the numbers, because the rounded mean of equal numbers may differ from them and give a variance above 0.
    if exact.numel() == 0 or bool((exact == exact[0]).all()):
        return 0.0
    return 1.0 - float((exact - values.double()).var(correction=0) / exact.var(correction=0))


def repetition(token_ids: Sequence[Sequence[int] | IntArray], n: int = 3) -> float:
    """Return the fraction of n-grams that repeat an earlier n-gram of their response, averaged over responses: 0..1.

    ``token_ids``: the ids [response tokens] of each response. A response of fewer than n+1 tokens counts as 0. Raises
    InvalidRequest.
    """
    _check_size(n)
    grams, owners = _ngrams(token_ids, n)
    if not len(grams):
        return 0.0
    pairs, size = _paired(owners, grams)
    all_of, distinct_of = (
        result.bincount(minlength=len(token_ids)).tolist() for result in (owners, _set(pairs) // size)
    )
    return sum(1.0 - some / all if all else 0.0 for some, all in zip(distinct_of, all_of, strict=True)) / len(token_ids)


def distinct(token_ids: Sequence[Sequence[int] | IntArray], n: int) -> float:
    """Return the number of distinct n-grams divided by the number of all n-grams, over all responses: 0..1, and 0 without
    n-grams.

    ``token_ids``: the ids [response tokens] of each response. An n-gram is within one response. The result is low if responses
    are similar. Source: Li et al. 2016 (distinct-n). Raises InvalidRequest.
    """
    _check_size(n)
    grams, _ = _ngrams(token_ids, n)
    return len(_set(grams)) / len(grams) if len(grams) else 0.0


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Pearson's correlation of ``a`` and ``b`` [n]: -1..1, and 0 if n < 2 or all values of one are equal.

    Raises InvalidRequest.
    """
    check_flat(a=a, b=b)
    x, y = a.double(), b.double()
    # Compare the numbers, because the rounded mean of equal numbers may differ from them and give a variance above 0.
    if x.numel() < 2 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(((x * y).sum() / (x.norm() * y.norm())).clamp(-1, 1))


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (0, values[0]), (1, values[1]), ...; 0 for fewer than two values."""
    middle = (len(values) - 1) / 2
    # The x values are centred, so the mean of the values has no effect.
    spread = sum((index - middle) ** 2 for index in range(len(values)))
    # Summed exactly, so that equal values have a slope of exactly 0.
    return math.fsum((index - middle) * value for index, value in enumerate(values)) / spread if spread else 0.0


def _ngrams(token_ids: Sequence[Sequence[int] | IntArray], n: int) -> tuple[Tensor, Tensor]:
    """Return each n-gram of a response as one number, equal for equal n-grams, and the response's index: int64 [n-grams]."""
    lengths = torch.tensor([len(response) for response in token_ids], dtype=torch.int64)
    starts = torch.arange(int(lengths.sum()))
    if len(starts) < n:
        return starts[:0], starts[:0]
    ids = torch.cat([torch.tensor(response, dtype=torch.int64) for response in token_ids])
    grams = ids = ids - ids.min()
    for offset in range(1, n):
        grams, _ = _paired(grams[:-1], ids[offset:])
    inside = (starts + n <= lengths.cumsum(0).repeat_interleave(lengths))[: len(grams)]
    owners = torch.arange(len(lengths)).repeat_interleave(lengths)[: len(grams)]
    return grams[inside], owners[inside]


def _paired(first: Tensor, second: Tensor) -> tuple[Tensor, int]:
    """Encode pairs of non-negative numbers as one number each. Also return the divisor that gives the first number.

    If the result would overflow, the second numbers are replaced by their ranks, then the first numbers by theirs.
    """
    if _too_large(first, second):
        second = torch.unique(second, return_inverse=True)[1]
    if _too_large(first, second):
        first = torch.unique(first, return_inverse=True)[1]
    size = int(second.max()) + 1
    return first * size + second, size


def _too_large(first: Tensor, second: Tensor) -> bool:
    return (int(first.max()) + 1) * (int(second.max()) + 1) > torch.iinfo(torch.int64).max


def _set(numbers: Tensor) -> Tensor:
    """Return the distinct numbers, sorted: int64 [numbers] -> [distinct numbers]."""
    ordered = numbers.clone()
    ordered.numpy().sort()  # Sorting with NumPy takes a tenth of the time.
    return ordered[torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])]


def _check_size(n: int) -> None:
    if n < 1:
        raise InvalidRequest(f"n-grams of {n} tokens: expected at least 1")
