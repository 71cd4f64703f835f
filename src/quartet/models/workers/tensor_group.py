"""Exchange of slices of tensors between the ranks of a tensor parallel group, with gradients.

Activations outside sliced layers are equal on all ranks, and so are their gradients. Inside, each rank has the activations of its
slice (Shoeybi et al. 2019, "Megatron-LM", section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Slicing:
    """Dimension ``dim``, of complete size ``size``, along which a parameter is sliced: equal slices, of which the last may be
    shorter."""

    dim: int
    size: int


class TensorGroup:
    """The ranks that compute slices of the same layers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._shared: tuple[Tensor, Tensor] | None = None

    def bounds(self, size: int) -> tuple[int, int]:
        """Return the first and the last index + 1 of this rank's slice of ``size`` elements."""
        step = self._step(size)
        return min(size, self.rank * step), min(size, (self.rank + 1) * step)

    def can_slice(self, size: int) -> bool:
        """Return whether every rank gets some of ``size`` elements."""
        return (self.size - 1) * self._step(size) < size

    def slice(self, value: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of ``value``, as a view."""
        start, end = self.bounds(value.shape[dim])
        return value.narrow(dim, start, end - start)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of the ranks' ``value``."""
        result = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.group)
        return result

    def gather(self, part: Tensor, slicing: Slicing) -> Tensor:
        """Return the complete tensor of which each rank has a slice."""
        step = self._step(slicing.size)
        rows = part.movedim(slicing.dim, 0)
        rows = functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, step - len(rows))).contiguous()
        result = rows.new_empty(self.size * step, *rows.shape[1:])
        dist.all_gather(list(result.chunk(self.size)), rows, group=self.group)
        return result[: slicing.size].movedim(0, slicing.dim).contiguous()

    def enter(self, value: Tensor) -> Tensor:
        """Return ``value``, equal on all ranks, as the input of sliced layers. Their gradients are summed.

        Consecutive layers with the same input share the result, so that their gradients are summed at once.
        """
        if not torch.is_grad_enabled() or not value.requires_grad:
            return value
        if self._shared is None or self._shared[0] is not value:
            self._shared = value, _Enter.apply(value, self)  # type: ignore[no-untyped-call]
        return self._shared[1]

    def leave(self, value: Tensor) -> Tensor:
        """Return the sum of the outputs ``value`` of sliced layers, differentiable."""
        self._shared = None
        result: Tensor = _Leave.apply(value, self)  # type: ignore[no-untyped-call]
        return result

    def join(self, value: Tensor, size: int) -> Tensor:
        """Return the complete outputs of which ``value`` has a slice of the last dimension, differentiable."""
        self._shared = None
        result: Tensor = _Join.apply(value, self, size)  # type: ignore[no-untyped-call]
        return result

    def divide(self, value: Tensor) -> Tensor:
        """Return this rank's slice of the last dimension of ``value``, which is equal on all ranks, differentiable."""
        result: Tensor = _Divide.apply(value, self)  # type: ignore[no-untyped-call]
        return result

    def _step(self, size: int) -> int:
        return -(-size // self.size)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradient), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, size: int) -> Tensor:
        ctx.group = group
        return group.gather(value, Slicing(value.ndim - 1, size))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.slice(gradient, -1), None, None


class _Divide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group, ctx.slicing = group, Slicing(value.ndim - 1, value.shape[-1])
        return group.slice(value, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradient, ctx.slicing), None
