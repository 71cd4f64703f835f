"""Flat [tokens] tensors with lengths [sequences]: sums per sequence, and conversion to and from padded matrices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quartet.errors import InvalidRequest

FEW = 16
"""At or below this number of remaining sequences, each sequence is summed separately."""


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each sequence's values: [tokens] -> [sequences], in the dtype of ``values``.

    The tokens are added one after the other in float64, so that other sequences do not change the bits of a sequence's sum.
    Differentiable. Raises InvalidRequest.
    """
    check_lengths(values.shape[0], lengths)
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=lengths.long())
    return sums.to(values.dtype)


@torch.no_grad()
def discounted_sum(values: Tensor, lengths: Tensor, discount: float | Tensor) -> Tensor:
    """Return S(t) = values(t) + discount S(t+1) within each sequence, with S = 0 after its last token: float64 [tokens] ->
    [tokens].

    ``discount`` is one number, or float64 [sequences].
    Other sequences do not change the bits of a sequence's result. The result has no gradient. Raises InvalidRequest.
    """
    check_lengths(values.shape[0], lengths)
    if isinstance(discount, Tensor):
        check_flat(discount=discount, lengths=lengths)
    sizes = lengths.long().cpu()
    last = sizes.cumsum(0) - 1
    # Row 0 has the last token of every sequence, row 1 the second-to-last tokens, and so on; the longest sequence comes first in
    # every row. So the successors of a row's tokens are the first tokens of the row before it, without padding.
    order = sizes.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    rows = len(sizes) - sizes.bincount().cumsum(0)[:-1]
    starts = rows.cumsum(0) - rows
    from_last = last.repeat_interleave(sizes) - torch.arange(len(values))
    indices = starts.gather(0, from_last) + rank.repeat_interleave(sizes)
    sums = torch.empty(len(values), dtype=torch.float64).scatter_(0, indices, values.double().cpu())
    # In the order of a row's tokens. A single number for all of them is faster.
    discounts = discount.double().cpu()[order].numpy() if isinstance(discount, Tensor) else None
    many = int((rows > FEW).sum())
    factors: Any = discount if discounts is None else discounts
    _accumulate_rows(sums.numpy(), starts[: many + 1].tolist(), rows[: many + 1].tolist(), factors)
    for row, size in enumerate(sizes[order[:FEW]].tolist()):
        if size > many:
            factor = float(factors if discounts is None else discounts[row])
            _accumulate_sequence(sums, starts[many:size] + row, factor)
    return sums.gather(0, indices).to(values.device)


def _accumulate_rows(sums: Any, starts: Sequence[int], rows: Sequence[int], discount: Any) -> None:
    """Add to each row the discounted first part of the row before it. ``sums`` is a NumPy array, which is fast for small sums.
    ``discount`` is a number, or a NumPy array with one for each token of the first row."""
    # Two operations, each rounded by IEEE 754. The rounding of a fused operation depends on the CPU.
    after = sums[: rows[0]]
    varies = not isinstance(discount, int | float)
    for start, count in zip(starts[1:], rows[1:], strict=True):
        now = sums[start : start + count]
        now += (discount[:count] if varies else discount) * after[:count]
        after = now


def _accumulate_sequence(sums: Tensor, indices: Tensor, discount: float) -> None:
    """Do the same for one sequence, at its indices ``indices``. For short rows, Python floats are faster."""
    accumulated = accumulate(sums[indices].tolist(), lambda after, now: now + discount * after)
    sums[indices] = torch.tensor(list(accumulated), dtype=torch.float64)


def to_padded(values: Tensor, lengths: Tensor, fill: float = 0.0) -> Tensor:
    """Pad on the right with ``fill``: [tokens] -> [sequences, longest]. Differentiable. Raises InvalidRequest."""
    check_lengths(values.shape[0], lengths)
    mask = _filled(lengths, int(lengths.max()))
    return torch.full(mask.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def from_padded(padded: Tensor, lengths: Tensor) -> Tensor:
    """Remove the padding of ``to_padded``: [sequences, at least longest] -> [tokens]. Differentiable. Raises InvalidRequest."""
    check_lengths(int(lengths.sum()), lengths)
    if padded.ndim != 2 or padded.shape[0] != lengths.shape[0] or padded.shape[1] < int(lengths.max()):
        raise InvalidRequest(
            f"padded {tuple(padded.shape)}: expected {lengths.shape[0]} rows of at least {int(lengths.max())} columns"
        )
    return padded.masked_select(_filled(lengths, padded.shape[1]))


def last_token_index(lengths: Tensor) -> Tensor:
    """Return the index of each sequence's last token in the flat tensor: int64 [sequences]. Raises InvalidRequest."""
    check_lengths(int(lengths.sum()), lengths)
    return lengths.cumsum(0) - 1


def check_lengths(tokens: int, lengths: Tensor) -> None:
    """Raise InvalidRequest unless ``lengths`` are positive integers [sequences] that add up to ``tokens``."""
    if lengths.ndim != 1 or lengths.shape[0] == 0 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InvalidRequest(
            f"lengths {tuple(lengths.shape)} {lengths.dtype}: expected integers [at least one sequence]"
        )
    if int(lengths.min()) < 1:
        raise InvalidRequest("lengths: every sequence needs at least one token")
    if int(lengths.sum()) != tokens:
        raise InvalidRequest(f"lengths add up to {int(lengths.sum())} tokens, the values have {tokens}")


def check_flat(**tensors: Tensor) -> None:
    """Raise InvalidRequest unless all are one-dimensional and equally long: broadcasting would hide the mistake."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise InvalidRequest(f"expected one-dimensional tensors of the same length, got {shapes}")


def _filled(lengths: Tensor, width: int) -> Tensor:
    """Return a mask that is True for tokens and False for padding: bool [sequences, width]."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]
