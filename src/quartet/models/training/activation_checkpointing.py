"""Gradient checkpointing: a layer's activations are computed again on the way back instead of being kept (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer


def count_checkpointed_layers(model: Any) -> int:
    """Layers of a model, or of a value model, that can be computed again: 0 where its architecture has none."""
    return len(_layers(model)) if model.base_model.supports_gradient_checkpointing else 0


@contextmanager
def activation_checkpointing(model: Any, on: bool = True) -> Iterator[None]:
    """While it lasts and is ``on``, a backward pass computes the layers of its forward pass again. The bits stay the same.

    Both passes belong inside.
    """
    if not on:
        yield
        return
    base, layers = model.base_model, _layers(model)
    base.activation_checkpointing_enable(
        {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), _attending_as_now(base.config)),
        }
    )
    # Asked of a layer alone; what is in it stays in evaluation mode.
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
    """A layer may read its rates from the model's config, and now it believes that it trains."""
    rates = {name: value for name, value in vars(config).items() if "drop" in name and isinstance(value, float)}
    for name in rates:
        setattr(config, name, 0.0)
    try:
        yield
    finally:
        for name, value in rates.items():
            setattr(config, name, value)


def _attending_as_now(config: Any) -> AbstractContextManager[None]:
    """Packed attention ends with the forward pass, and a layer that is computed again is to attend as it did."""
    wanted = config._attn_implementation

    @contextmanager
    def attending() -> Iterator[None]:
        before = config._attn_implementation
        config._attn_implementation = wanted
        try:
            yield
        finally:
            config._attn_implementation = before

    return attending()


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
