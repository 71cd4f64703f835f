"""Linear layers that compute with oneDNN on a CPU. Opt-in: the setting `run.onednn_linear`.

torch gives a float32 matmul to MKL, which does not use AVX-512 on AMD processors. oneDNN does, and takes about half of the time
there. See docs/adr/0025-onednn-linear-layers.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from quartet.errors import ConfigError

MIN_MULTIPLICATIONS = 2**20
"""Minimum number of multiplications for oneDNN. For smaller matmuls the call would take longer than the computation."""


_enabled = False


def enable_onednn_linear() -> None:
    """Make this process compute the linear layers of models that it loads from now on with oneDNN.

    Raises ConfigError if torch lacks oneDNN's operator.
    """
    global _enabled
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise ConfigError("run.onednn_linear: this build of torch has no oneDNN linear operator; set it to false")
    _enabled = True


def use_onednn_linear(model: nn.Module) -> None:
    """Make the linear layers of ``model`` compute with oneDNN if this process enables it. The weights are unchanged."""
    if not _enabled:
        return
    for module in model.modules():
        # Exactly these classes, because subclasses may compute differently.
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif type(module) is Conv1D:
            module.__class__ = _Conv1D


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``inputs`` [..., in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [..., out]. Differentiable.

    Uses oneDNN if it is enabled, the tensors are float32 on a CPU and the matmul is large enough, and torch otherwise.
    """
    rows = inputs.numel() // inputs.shape[-1] if inputs.shape[-1] else 0
    is_float32_on_cpu = inputs.device.type == "cpu" and inputs.dtype == torch.float32
    if not is_float32_on_cpu or rows * weight.numel() < MIN_MULTIPLICATIONS or not _enabled:
        return functional.linear(inputs, weight, bias)
    flat = inputs.reshape(rows, inputs.shape[-1]).contiguous()
    if torch.is_grad_enabled():
        outputs: Tensor = _OneDnnLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        outputs = _matmul(flat, weight, bias)
    return outputs.view(*inputs.shape[:-1], weight.shape[0])


def _matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left`` [n, k] times ``right`` [m, k] transposed: [n, m].

    oneDNN generates and caches code for each number of rows, so it only gets round numbers of rows. The remaining rows are either
    padded with zeros or computed by torch, whichever copies less.
    """
    rows, remainder = len(left), len(left) % _row_step(len(left))
    if remainder == 0:
        return _onednn(left, right, bias)
    if left.shape[1] <= right.shape[0]:
        filled = left.new_zeros(rows + _row_step(rows) - remainder, left.shape[1])
        filled[:rows] = left
        return _onednn(filled, right, bias)[:rows]
    round_rows = rows - remainder
    return torch.cat([_onednn(left[:round_rows], right, bias), functional.linear(left[round_rows:], right, bias)])


def _row_step(rows: int) -> int:
    """Return the step between round numbers of rows. There are sixteen round numbers from each power of 2 to the next."""
    return 1 << max(0, rows.bit_length() - 5)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left`` [n, k] times ``right`` [m, k] transposed: [n, m]. Copies ``left`` unless its rows are contiguous."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


class _OneDnnLinear(torch.autograd.Function):
    """A linear layer with its three matmuls: outputs, and in the backward pass the gradients of inputs and weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _matmul(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        # oneDNN is very slow with an expanded tensor.
        gradient = gradient.contiguous()
        return (
            _matmul(gradient, weight.t()) if needs_inputs else None,
            _weight_gradient(gradient, inputs) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """Return ``gradient`` [n, out] transposed times ``inputs`` [n, in]: [out, in]. Copies the narrower of the two."""
    rows = len(gradient)
    round_rows = rows - rows % _row_step(rows)
    if gradient.shape[1] <= inputs.shape[1]:
        product = _onednn(gradient[:round_rows].t(), inputs[:round_rows].t())
    else:
        product = _onednn(inputs[:round_rows].t(), gradient[:round_rows].t()).t().contiguous()
    return product if round_rows == rows else product.addmm_(gradient[round_rows:].t(), inputs[round_rows:])


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Conv1D(Conv1D):
    """The linear layer of GPT-2, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.t(), self.bias)
