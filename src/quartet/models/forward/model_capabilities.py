"""Capabilities of a transformers model, and checks before a forward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from quartet.contract.trajectory import TokenBatch
from quartet.errors import InvalidRequest

_WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}


def attends_to_all(model: Any, beside_states: bool = False) -> bool:
    """Return whether every layer of the model attends to all previous tokens, without a sliding window or an index.

    ``beside_states``: whether every layer that has attention does, beside layers and parts of layers that keep a state.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if beside_states and kinds:
        return kinds - _WITHOUT_ATTENTION <= {"full_attention", "hybrid"}
    return kinds == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None


@contextmanager
def attention_implementation(model: Any, name: str | None) -> Iterator[None]:
    """Make the model use the attention of this name in transformers' registry inside the context. None changes nothing."""
    if name is None:
        yield
        return
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def backbone(model: Any) -> Any:
    """Return the part of a model, or value model, that returns hidden states."""
    base = model.base_model
    if base is not model:
        return base
    # The class of a few causal LMs names a part as its base model that only their multimodal relatives have.
    if hasattr(model, "model"):
        return model.model
    # A few multimodal models consist of towers and a causal LM.
    is_wrapper = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None
    return backbone(model.get_decoder()) if is_wrapper and model.get_decoder() is not model else base


def is_encoder_classifier(model: Any) -> bool:
    """Return whether a model is a classifier that reads whole texts under a mask, not the hidden state of their last token."""
    is_classifier = "ForSequenceClassification" in type(model).__name__
    return is_classifier and not isinstance(getattr(model, "score", None), nn.Module)


def has_experts(model: nn.Module) -> bool:
    """Return whether the model is a mixture of experts, whose experts compute as many rows as a batch routes to them."""
    return any(
        "expert" in name or (parameter.ndim == 3 and not isinstance(module, nn.Conv1d))
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(prefix, recurse=False)
    )


def keeps_states(model: Any) -> bool:
    """Return whether a layer keeps a state per sequence, which a pad after a prompt would change."""
    return any(isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=model.config).layers)


def accepts_argument(model: nn.Module, argument: str) -> bool:
    """Return whether the model's forward method has a parameter of this name."""
    kind: Any = type(model)
    return argument in _parameters(kind)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's inputs. Shards of a model on a GPU may be in host memory."""
    parameter = next(model.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == "cpu":
        return parameter.device
    return torch.device(mesh.device_type, torch.cuda.current_device())


def check_batch(model: Any, batch: TokenBatch) -> None:
    """Raise InvalidRequest if a token id is outside the model's vocabulary, or if a sequence is longer than the model allows."""
    batch.check_vocabulary(vocabulary_size(model))
    check_lengths(model, batch.lengths)


def check_lengths(model: Any, lengths: NDArray[np.signedinteger[Any]]) -> None:
    """Raise InvalidRequest if a sequence of one of these lengths does not fit the model."""
    limit, longest = max_positions(model), int(np.max(lengths))
    if limit is not None and longest > limit:
        raise InvalidRequest(
            f"a sequence of {longest} tokens: the model has positions for {limit}; "
            "shorten the prompt or the response (data.max_prompt_tokens, rollout.max_response_tokens, --max-tokens)"
        )


def vocabulary_size(model: Any) -> int:
    """Return the number of token ids that have an embedding."""
    # Not the shape of the weight, of which a rank of a worker group may hold a part.
    return int(model.get_input_embeddings().num_embeddings)


def max_positions(model: Any) -> int | None:
    """Return the maximum number of tokens of a sequence, or None if the config sets no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    if "roberta" in config.model_type or config.model_type == "camembert":
        # These models count positions from the pad id + 1, so the first rows of their table are unused.
        limit -= (config.pad_token_id or 0) + 1
    return limit


@functools.cache
def _parameters(kind: Any) -> frozenset[str]:
    """Return the parameters of a model class's forward method. Cached: a lookup costs a few small matmuls."""
    return frozenset(inspect.signature(kind.forward).parameters)
