"""Sizes of a model of any causal type: by formulas, or measured in transformers. Imports torch only to measure.

`quartet.model_files.shape` has formulas for some types. For every other type, `quartet.planner.meta_model` builds the model
without weights and follows a forward pass through it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quartet.errors import ConfigError
from quartet.model_files.model_support import encoder_reason
from quartet.model_files.shape import FAMILIES, ModelShape, SequenceState, model_shape


@dataclass(frozen=True, slots=True)
class Saved:
    """Tensors saved for the backward pass, per token: elements in half precision, further bytes, and bytes per pair of tokens."""

    half: float = 0.0
    other: float = 0.0
    pair: float = 0.0

    def bytes(self, dtype_bytes: int, longest: int) -> float:
        """Return the bytes per token in a sequence of ``longest`` tokens."""
        return self.half * dtype_bytes + self.other + self.pair * longest


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape(ModelShape):
    """Sizes of a model that transformers has built. ``matrices``: weights of all layers that a token is multiplied with.

    ``adapted``: inputs and outputs of all matrices that an adapter changes. ``saved_layers`` is the sum over all layers.
    """

    backbone: int
    in_layers: int
    in_experts: int
    matrices: int
    adapted: int
    attending: int
    kept: SequenceState
    saved_layers: Saved
    saved_outside: Saved

    @property
    def embedding_parameters(self) -> int:
        """Parameters outside the layers, without the vocabulary projection."""
        return self.backbone - self.in_layers

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers. Those that several layers share count once."""
        return self.in_layers

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the vocabulary projection."""
        return self.backbone

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts that are chosen for each token, in all layers."""
        return self.in_experts

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return self.attending

    @property
    def state(self) -> SequenceState:
        """What the cache of transformers keeps of a sequence."""
        return self.kept

    def matmul_weights(self) -> int:
        """Return the weights that each token is multiplied with, without the vocabulary projection."""
        return self.matrices

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of adapters of this rank on all linear layers and experts of the decoder."""
        return rank * self.adapted

    def saved_layer_bytes(self, dtype_bytes: int, longest: int, tensor: int = 1) -> float:
        """Return the bytes per token that an average layer saves for the backward pass, as transformers computes it in torch.

        Fused kernels of recurrent layers save less. ``tensor`` is 1 for all measured models.
        """
        return self.saved_layers.bytes(dtype_bytes, longest) / self.layers / tensor

    def saved_model_bytes(self, dtype_bytes: int) -> float:
        """Return the bytes per token that the model saves outside its layers."""
        return self.saved_outside.bytes(dtype_bytes, 0) + dtype_bytes * self.hidden


def shape_of(description: Mapping[str, Any], where: str) -> ModelShape:
    """Return the sizes that a config.json describes. ``where`` names it in messages. Raises ConfigError."""
    kind = description.get("model_type")
    if kind in FAMILIES or any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return model_shape(description, where)
    try:
        if (reason := encoder_reason({**description})) is not None or description.get("is_encoder_decoder"):
            raise ValueError(reason or "an encoder-decoder model")
        return _measured(json.dumps(description, sort_keys=True))
    except Exception as error:  # transformers checks a config in many places, each with its own errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{where}: config.json has model_type {kind!r}, and transformers cannot build a causal model from it ({reason}); "
            "expected a causal language model; correct config.json, or plan with a model of the same size of another type"
        ) from error


@lru_cache(maxsize=8)
def _measured(text: str) -> MeasuredShape:
    from quartet.planner import meta_model  # It imports torch.

    return meta_model.measure(text)
