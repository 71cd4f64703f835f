"""Flat [tokens] tensors with lengths [sequences]: sums within each, and the way to a padded matrix and back."""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.errors import InvalidRequest


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each sequence's tokens: [tokens] -> [sequences], in the dtype of ``values``.

    Adds one token after the other in float64, so that a sequence's sum has the same bits whatever its neighbours are.
    Differentiable. Raises InvalidRequest.
    """
    check_lengths(values.shape[0], lengths)
    sums: Tensor = torch.segment_reduce(values.double(), "sum", lengths=lengths.long())
    return sums.to(values.dtype)


@torch.no_grad()
def discounted_sum(values: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """S(t) = values(t) + discount S(t+1) within each sequence, 0 after its last token: float64 [tokens] -> [tokens].

    A sequence's result has the same bits whatever else is in the batch. No gradient flows. Raises InvalidRequest.
    """
    # Padding is 0 and only ever follows a sequence's tokens, so walking back through it adds exactly nothing.
    # Time first, so that each step of the walk reads contiguous memory. Product and sum stay two operations, each
    # rounded as IEEE says: how a fused one rounds depends on the CPU's instructions.
    by_time = to_padded(values, lengths).t().contiguous()
    rows = by_time.unbind(0)
    for now, after in zip(rows[-2::-1], rows[:0:-1], strict=True):
        now += discount * after
    return from_padded(by_time.t(), lengths)


def to_padded(values: Tensor, lengths: Tensor, fill: float = 0.0) -> Tensor:
    """[tokens] -> [sequences, longest], rows left-aligned, the rest ``fill``. Differentiable. Raises InvalidRequest."""
    check_lengths(values.shape[0], lengths)
    mask = _filled(lengths, int(lengths.max()))
    return torch.full(mask.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def from_padded(padded: Tensor, lengths: Tensor) -> Tensor:
    """[sequences, at least longest] -> [tokens]: inverse of ``to_padded``. Differentiable. Raises InvalidRequest."""
    check_lengths(int(lengths.sum()), lengths)
    if padded.ndim != 2 or padded.shape[0] != lengths.shape[0] or padded.shape[1] < int(lengths.max()):
        raise InvalidRequest(
            f"padded {tuple(padded.shape)}: expected {lengths.shape[0]} rows of at least {int(lengths.max())} columns"
        )
    return padded.masked_select(_filled(lengths, padded.shape[1]))


def last_token_index(lengths: Tensor) -> Tensor:
    """Where each sequence's last token lies in the flat tensor: int64 [sequences]. Raises InvalidRequest."""
    check_lengths(int(lengths.sum()), lengths)
    return lengths.cumsum(0) - 1


def check_lengths(tokens: int, lengths: Tensor) -> None:
    """Raises InvalidRequest unless ``lengths`` are positive integers [sequences] that add up to ``tokens``."""
    if lengths.ndim != 1 or lengths.shape[0] == 0 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise InvalidRequest(
            f"lengths {tuple(lengths.shape)} {lengths.dtype}: expected integers [at least one sequence]"
        )
    if int(lengths.min()) < 1:
        raise InvalidRequest("lengths: every sequence needs at least one token")
    if int(lengths.sum()) != tokens:
        raise InvalidRequest(f"lengths add up to {int(lengths.sum())} tokens, the values have {tokens}")


def check_flat(**tensors: Tensor) -> None:
    """Raises InvalidRequest unless all are one-dimensional and equally long: broadcasting would hide the mistake."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise InvalidRequest(f"expected one-dimensional tensors of the same length, got {shapes}")


def _filled(lengths: Tensor, width: int) -> Tensor:
    """True where a padded row holds a token: bool [sequences, width]."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]
