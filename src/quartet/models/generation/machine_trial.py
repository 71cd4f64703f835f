"""The trial of the torch engine outside of a run, for `quartet doctor`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.config.models import LoraConfig
from quartet.contract.generation import EngineProperties
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import torch_threads
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter

SMALL_MODEL = "a random Llama, 128 wide"
"""Model of ``try_small_model``. Narrower models get other code from matmul libraries than those of users."""
CONCURRENT = 64


def try_small_model(threads: int) -> EngineProperties:
    """Return what the torch engine declares with a small float32 model on this machine's CPU."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng(devices=[]), torch_threads(threads):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        return TorchEngine(model.eval(), frozenset(), CONCURRENT).properties


def try_model(
    model: str,
    dtype: str,
    adapter: LoraConfig | None,
    merge_adapter: bool,
    max_concurrent_sequences: int,
    threads: int,
) -> EngineProperties:
    """Return what the torch engine declares with a checkpoint on this machine's CPU. Raises ModelError.

    ``adapter``: settings of the LoRA adapter that is trained.
    """
    with torch_threads(threads):
        loaded = load_causal_lm(model, dtype)
        added = add_adapter(loaded, model, adapter) if adapter is not None else None
        merged = added if merge_adapter else None
        return TorchEngine(loaded, frozenset(), max_concurrent_sequences, merged=merged).properties
