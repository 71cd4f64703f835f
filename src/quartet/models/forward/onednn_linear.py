"""The products of linear layers on a CPU, by oneDNN where that is the faster of the two libraries that torch has.

torch gives a float32 product to MKL, which leaves AVX-512 alone on AMD's processors; oneDNN, which torch has for other types,
does not, and takes half of the time there (docs/adr/0025-onednn-linear-layers.md).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

LEAST = 2**20
"""Multiplications of a product from which on oneDNN is called: below, the call takes longer than the product."""
_CPU = Path("/proc/cpuinfo")


def use_onednn_linear(model: nn.Module) -> None:
    """Has the linear layers of ``model`` compute by oneDNN, where that is faster on this machine; their weights stay what they
    are, and so does all else.

    Decided by the processor alone, so that a run has the same bits on machines of one kind.
    """
    if not onednn_is_faster():
        return
    for module in model.modules():
        # Of exactly these classes: others compute in their own way.
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif type(module) is Conv1D:
            module.__class__ = _Conv1D


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this is a processor on which MKL does not use the widest instructions that there are, and oneDNN does."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return _CPU.is_file() and "AuthenticAMD" in _CPU.read_text()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``inputs`` [..., in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [..., out]. With gradients.

    By oneDNN where that is faster: float32 on such a processor, and not too few.
    """
    rows = inputs.numel() // inputs.shape[-1] if inputs.shape[-1] else 0
    single = inputs.device.type == "cpu" and inputs.dtype == torch.float32
    if not single or rows * weight.numel() < LEAST or not onednn_is_faster():
        return functional.linear(inputs, weight, bias)
    flat = inputs.reshape(rows, inputs.shape[-1]).contiguous()
    if torch.is_grad_enabled():
        found: Tensor = _Product.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        found = _product(flat, weight, bias)
    return found.view(*inputs.shape[:-1], weight.shape[0])


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left`` [n, k] times ``right`` [m, k] transposed: [n, m].

    oneDNN keeps what it has generated for each number of rows, so it is given round ones: filled up with zeros, or the few rows
    above by torch, whichever copies less.
    """
    rows, over = len(left), len(left) % _step(len(left))
    if over == 0:
        return _onednn(left, right, bias)
    if left.shape[1] <= right.shape[0]:
        filled = left.new_zeros(rows + _step(rows) - over, left.shape[1])
        filled[:rows] = left
        return _onednn(filled, right, bias)[:rows]
    some = rows - over
    return torch.cat([_onednn(left[:some], right, bias), functional.linear(left[some:], right, bias)])


def _step(rows: int) -> int:
    """Round are multiples of it: sixteen numbers from each power of 2 to the next."""
    return 1 << max(0, rows.bit_length() - 5)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left`` is copied unless its rows are contiguous."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


class _Product(torch.autograd.Function):
    """A linear layer with its three products: the outputs', and on the way back the inputs' and the weight's."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        # One that was expanded would be multiplied by the slowest of all ways.
        gradient = gradient.contiguous()
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _weight_gradient(gradient, inputs) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """``gradient`` [n, out] transposed times ``inputs`` [n, in]: [out, in]. The narrower of them is the one that is copied."""
    rows = len(gradient)
    some = rows - rows % _step(rows)
    if gradient.shape[1] <= inputs.shape[1]:
        found = _onednn(gradient[:some].t(), inputs[:some].t())
    else:
        found = _onednn(inputs[:some].t(), gradient[:some].t()).t().contiguous()
    return found if some == rows else found.addmm_(gradient[some:].t(), inputs[some:])


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Conv1D(Conv1D):
    """GPT-2's linear layer, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)
