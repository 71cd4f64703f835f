"""Linear layers that compute with oneDNN, on x86-64 processors of other vendors than Intel.

torch gives a float32 matmul to MKL. There it does not use AVX-512, and rounds a row by the number of rows. oneDNN takes about
half of the time with AVX-512, and rounds a row in the same way in any batch. See docs/adr/0025-the-same-bits-in-any-batch.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from quartet.system.compute_environment import is_intel

_is_on: ContextVar[bool] = ContextVar("onednn_linear", default=False)
_is_allowed: ContextVar[bool] = ContextVar("onednn_allowed", default=True)


@contextmanager
def onednn_linear() -> Iterator[None]:
    """Compute linear layers inside the context with oneDNN, if this processor needs it. Also a decorator.

    Applies to the calling thread, forward and backward.
    """
    if is_needed() and _is_allowed.get():
        token = _is_on.set(True)
        try:
            with _LinearMode():
                yield
        finally:
            _is_on.reset(token)
    else:
        yield


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let ``onednn_linear`` change nothing inside the context."""
    token = _is_allowed.set(False)
    try:
        yield
    finally:
        _is_allowed.reset(token)


def same_linear() -> AbstractContextManager[None]:
    """Return a context that computes linear layers as here. A backward pass needs it to compute a checkpointed layer again.

    Inside ``Tensor.backward`` the mode is off, and a layer that is computed differently saves other tensors.
    """
    return onednn_linear() if _is_on.get() else nullcontext()


@functools.cache
def is_needed() -> bool:
    """Return whether oneDNN computes linear layers here: not an Intel processor, AVX2 or more, and a torch with the operator."""
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and not is_intel()


class _LinearMode(TorchFunctionMode):
    """Replaces ``functional.linear``, which ``nn.Linear`` calls. Inside a call of this method the mode is off."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        return (linear if function is functional.linear else function)(*arguments, **named or {})


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input`` [..., in] times ``weight`` [out, in] transposed, plus ``bias`` [out]: [..., out]. Differentiable.

    Uses oneDNN if the tensors are float32 on a CPU, and torch otherwise. Small weights, too, although the call takes longer than
    their matmul: MKL would round a row by the number of rows.
    """
    is_float32_on_cpu = input.device.type == "cpu" and input.dtype == weight.dtype == torch.float32
    if not is_float32_on_cpu or not input.numel():
        return functional.linear(input, weight, bias)
    flat = input.reshape(-1, weight.shape[1]).contiguous()
    if torch.is_grad_enabled():
        outputs: Tensor = _OneDnnLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
    else:
        outputs = _matmul(flat, weight, bias)
    return outputs.view(*input.shape[:-1], weight.shape[0])


class _OneDnnLinear(torch.autograd.Function):
    """A linear layer with its three matmuls: outputs, and in the backward pass the gradients of inputs and weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        outputs = _matmul(inputs, weight, bias)
        # Models such as Llama 4 change outputs in place, which torch forbids for a view that a function of its own returns.
        return outputs if outputs._base is None else outputs.clone()

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


def _matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left`` [n, k] times ``right`` [m, k] transposed: [n, m].

    oneDNN generates code for each number of rows and keeps it, so it gets round numbers of rows: zeros are added.
    It gets at least two, because it rounds a single row in another way.
    """
    added = -len(left) % _row_step(len(left)) if len(left) > 1 else 1
    return (
        _onednn(functional.pad(left, (0, 0, 0, added)), right, bias)[: len(left)]
        if added
        else _onednn(left, right, bias)
    )


def _weight_gradient(gradient: Tensor, inputs: Tensor) -> Tensor:
    """Return ``gradient`` [n, out] transposed times ``inputs`` [n, in]: [out, in]. oneDNN copies the narrower of the two."""
    rows = len(gradient)
    round_rows = rows - rows % _row_step(rows)
    if gradient.shape[1] <= inputs.shape[1]:
        product = _onednn(gradient[:round_rows].t(), inputs[:round_rows].t())
    else:
        product = _onednn(inputs[:round_rows].t(), gradient[:round_rows].t()).t().contiguous()
    return product if round_rows == rows else product.addmm_(gradient[round_rows:].t(), inputs[round_rows:])


def _row_step(rows: int) -> int:
    """Return the step between round numbers of rows. There are sixteen round numbers from each power of 2 to the next."""
    return 1 << max(0, rows.bit_length() - 5)


def _onednn(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left`` [n, k] times ``right`` [m, k] transposed: [n, m]. Copies ``left`` unless its rows are contiguous."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return result
