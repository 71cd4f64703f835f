"""Tensor parallelism: the ranks of a group compute slices of a model's layers, by the plan of its architecture in transformers.

A plan gives a style to layers: ``colwise`` slices the outputs of a linear layer, ``rowwise`` the inputs of the one after it. Each
rank holds its slice of the weights as a plain tensor, so that packing, checkpointing and LoRA work as in one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quartet.errors import ModelError
from quartet.models.forward.lora_dropout import TokenDropout
from quartet.models.forward.model_capabilities import backbone, device_of, vocabulary_size
from quartet.models.forward.packing import TOLERANCE, hidden_states
from quartet.models.value_head import ValueModel
from quartet.models.workers.tensor_group import Slicing, TensorGroup

REMEDY = "set tensor 1, and shard the parameters instead"


@dataclass(slots=True)
class SlicedParameters:
    """Names of the parameters that are sliced, and of those that are whole but get only a part of their gradient on each rank.

    ``expected``: hidden states of a few tokens before the slicing.
    """

    slicings: dict[str, Slicing]
    partial: set[str]
    expected: Tensor


def slice_layers(model: Any, group: TensorGroup) -> SlicedParameters:
    """Slice the layers of a model, or value model, in place, and let their forward passes exchange activations.

    Every rank must have loaded the same weights, to any device. Parameters of LoRA stay whole. The caller then calls
    ``check_slices`` on the device of the group. Raises ModelError if the architecture has no plan, if the plan cannot be applied,
    or if the number of ranks does not divide the attention heads.
    """
    base = model.backbone if isinstance(model, ValueModel) else model
    plan: dict[str, str] = base.tp_plan or {}
    kind = base.config.model_type
    setting = _setting(group)
    if not plan:
        raise ModelError(f"{setting}: a {kind} model has no tensor parallel plan in transformers; {REMEDY}")
    if unknown := sorted({style for style in plan.values() if style not in STYLES}):
        raise ModelError(
            f"{setting}: the plan of a {kind} model has the style {unknown[0]}, which is not supported; {REMEDY}"
        )
    config = base.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % group.size:
            raise ModelError(f"{setting}: does not divide {name} {heads} of the {kind} model; set a divisor of {heads}")
    expected = _outputs(model)
    slicings, partial = _Slicer(base, group).apply(plan, "backbone." if base is not model else "")
    return SlicedParameters(slicings, partial, expected)


def check_slices(model: Any, group: TensorGroup, expected: Tensor) -> None:
    """Raise ModelError if the sliced model computes other hidden states than ``expected``. Runs one forward pass."""
    outputs = _outputs(model)
    expected = expected.to(outputs.device)
    difference = (outputs - expected).abs().max() / expected.abs().max()
    # False for NaN: scoring and updates report diverged weights.
    if difference > TOLERANCE[expected.dtype]:
        raise ModelError(
            f"{_setting(group)}: the {model.config.model_type} model computes other hidden states with the plan of transformers, "
            f"by {difference:.1e} of the largest; {REMEDY}"
        )


def _setting(group: TensorGroup) -> str:
    return f"tensor {group.size}"


@torch.no_grad()
def _outputs(model: Any) -> Tensor:
    base = backbone(model)
    return hidden_states(base, torch.arange(4, device=device_of(base))[None] % vocabulary_size(base))


class _Slicer:
    """Slices the parameters of layers, each parameter once, also if several layers share it."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        self._model, self._group = model, group
        self._done: dict[nn.Parameter, Slicing] = {}
        self._partial = set[nn.Parameter]()

    def apply(self, plan: dict[str, str], prefix: str) -> tuple[dict[str, Slicing], set[str]]:
        """Slice the layers that ``plan`` names. Return the names for ``SlicedParameters``, with ``prefix``."""
        patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
        for name, module in list(self._model.named_modules()):
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), None)
            if style is not None:
                try:
                    STYLES[style](self, module)
                except _NotSliceable as error:
                    raise ModelError(f"tensor {self._group.size}: layer {name}: {error}; {REMEDY}") from None
        names = {prefix + name: parameter for name, parameter in self._model.named_parameters()}
        return (
            {name: self._done[parameter] for name, parameter in names.items() if parameter in self._done},
            {name for name, parameter in names.items() if parameter in self._partial},
        )

    def columns(self, layer: Any, gathers: bool = False) -> None:
        """Slice the outputs of a linear layer. ``gathers``: every rank gets all outputs."""
        group, linear = self._group, _linear(layer)
        width = linear.out_features
        self._slice(linear.weight, 0)
        if linear.bias is not None:
            self._slice(linear.bias, 0)
        self._slice_adapter(layer, "lora_B", 0)

        def compute(forward: Callable[..., Tensor], x: Tensor, *arguments: Any, **named: Any) -> Tensor:
            outputs = forward(group.enter(x), *arguments, **named)
            return group.join(outputs, width) if gathers else outputs

        _compute(layer, compute)

    def rows(self, layer: Any, divides: bool = False) -> None:
        """Slice the inputs of a linear layer, and sum its outputs. ``divides``: every rank gets all inputs."""
        group, linear = self._group, _linear(layer)
        self._slice(linear.weight, 1)
        self._slice_adapter(layer, "lora_A", 1)

        def compute(forward: Callable[..., Tensor], x: Tensor, *arguments: Any, **named: Any) -> Tensor:
            # The bias is added once, to the sum.
            bias = linear._parameters["bias"]
            linear._parameters["bias"] = None
            try:
                outputs = forward(group.divide(x) if divides else x, *arguments, **named)
            finally:
                linear._parameters["bias"] = bias
            total = group.leave(outputs)
            return total if bias is None else total + bias

        _compute(layer, compute)

    def vocabulary(self, layer: Any) -> None:
        """Slice the vocabulary of an embedding. Each rank looks its own tokens up, and the results are summed."""
        if not isinstance(layer, nn.Embedding):
            raise _NotSliceable(f"a {type(layer).__name__} is not an embedding")
        group = self._group
        start, end = group.bounds(layer.num_embeddings)
        self._slice(layer.weight, 0)
        if layer.padding_idx is not None:
            # The embedding of this token gets no gradient.
            layer.padding_idx = layer.padding_idx - start if start <= layer.padding_idx < end else None

        def compute(forward: Callable[..., Tensor], ids: Tensor) -> Tensor:
            others = (ids < start) | (ids >= end)
            outputs = forward((ids - start).masked_fill(others, 0))
            return group.leave(outputs.masked_fill(others[..., None], 0))

        _compute(layer, compute)

    def whole(self, layer: nn.Module) -> None:
        """Keep the parameters of a layer whole, which computes with this rank's slice of the activations."""
        self._partial.update(layer.parameters())

    def _slice(self, parameter: Any, dim: int) -> None:
        slicing = Slicing(dim, parameter.shape[dim])
        if parameter in self._done:
            return
        if not self._group.can_slice(slicing.size):
            raise _NotSliceable(f"{slicing.size} features are too few to slice")
        # A copy, because a view would keep the complete tensor in memory.
        parameter.data = self._group.slice(parameter.data, dim).clone()
        self._done[parameter] = slicing

    def _slice_adapter(self, layer: Any, sliced: str, dim: int) -> None:
        """Let a layer's LoRA adapter, if there is one, compute with a slice of one factor. Both factors stay whole."""
        group = self._group
        factors = {name: getattr(layer, name, {}) for name in ("lora_A", "lora_B")}
        self._partial.update(factor.weight for each in factors.values() for factor in each.values())
        for dropout in getattr(layer, "lora_dropout", {}).values():
            if sliced == "lora_A" and isinstance(dropout, TokenDropout):
                dropout.first_feature = group.bounds(_linear(layer).in_features)[0]
        for factor in factors[sliced].values():

            def compute(_: Any, x: Tensor, factor: Any = factor) -> Tensor:
                return functional.linear(x, group.slice(factor.weight, dim))

            _compute(factor, compute)


class _NotSliceable(Exception):
    pass


def _linear(layer: Any) -> Any:
    """Return the linear layer of a layer, which may have a LoRA adapter."""
    linear = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    if not isinstance(linear, nn.Linear):
        raise _NotSliceable(f"a {type(linear).__name__} is not a linear layer")
    return linear


def _compute(module: Any, compute: Callable[..., Tensor]) -> None:
    """Replace the forward pass of ``module`` by ``compute``, whose first argument is the original one."""
    forward = module.forward
    module.forward = lambda *arguments, **named: compute(forward, *arguments, **named)


STYLES: dict[str, Callable[[_Slicer, Any], None]] = {
    "colwise": _Slicer.columns,
    "colwise_gather_output": lambda slicer, layer: slicer.columns(layer, gathers=True),
    "rowwise": _Slicer.rows,
    "rowwise_split_input": lambda slicer, layer: slicer.rows(layer, divides=True),
    "embedding_rowwise": _Slicer.vocabulary,
    "replicated_with_grad_allreduce": _Slicer.whole,
}
"""Styles of transformers' plans."""
