"""Activation checkpointing: the backward pass recomputes a layer's activations instead of storing them (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.models.forward.onednn_linear import same_linear


def count_checkpointed_layers(model: Any) -> int:
    """Return the number of layers of a model or value model that can be recomputed: 0 if the architecture does not support it."""
    return len(transformer_layers(model)) if model.base_model.supports_gradient_checkpointing else 0


@contextmanager
def activation_checkpointing(model: Any, on: bool = True) -> Iterator[None]:
    """Recompute activations in the backward pass inside the context, if ``on``. The results are bit-identical.

    Both the forward and the backward pass must be inside the context.
    """
    if not on:
        yield
        return
    base, layers = model.base_model, transformer_layers(model)
    base.activation_checkpointing_enable(
        {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), _current_attention(base.config)),
        }
    )
    # transformers checks only the layer's own flag. Its submodules stay in evaluation mode.
    with _without_dropout(base.config):
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False
            base.activation_checkpointing_disable()


@contextmanager
def _without_dropout(config: Any) -> Iterator[None]:
    """Set the dropout rates of the config to 0 inside the context: a layer in training mode may read them."""
    rates = {name: value for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    for name in rates:
        setattr(config, name, 0.0)
    try:
        yield
    finally:
        for name, value in rates.items():
            setattr(config, name, value)


def _current_attention(config: Any) -> AbstractContextManager[None]:
    """Return a context that restores the current attention and linear layers.

    Packed attention ends with the forward pass, but a recomputed layer must use the same attention as before.
    """
    current, linear = config._attn_implementation, same_linear()

    @contextmanager
    def attending() -> Iterator[None]:
        before = config._attn_implementation
        config._attn_implementation = current
        try:
            with linear:
                yield
        finally:
            config._attn_implementation = before

    return attending()


def transformer_layers(model: Any) -> list[Any]:
    """Return the layers of a model or value model."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
