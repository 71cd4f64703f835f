"""A LoRA adapter in the format of TensorRT-LLM requests: one row of weights per layer, and a description of each row."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ModelError
from quartet.models.weights.lora import Adapter

MODULES = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
"""TensorRT-LLM's module ids (attn_q, attn_k, attn_v, attn_dense, mlp_h_to_4h, mlp_4h_to_h, mlp_gate) by Hugging Face layer."""

FUSED_ATTENTION = ("q_proj", "k_proj", "v_proj")
"""TensorRT-LLM computes these in one matmul."""


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """``weights`` float32 [layers, longest]: A [rank, inputs], then B [outputs, rank] times alpha / rank, flattened, then zeros.

    ``config`` int32 [layers, 3]: module, index of the layer, rank. ``task`` identifies the weights: it is a hash of them, so a
    server that knows the number has these weights.
    """

    weights: NDArray[np.float32]
    config: NDArray[np.int32]
    task: int


def lora_tensors(adapter: Adapter) -> LoraTensors:
    """Copy the adapter's weights. Raises ModelError for layers that TensorRT-LLM does not support."""
    rows, config = [], []
    for name, a, b in adapter.matrices():
        layer = re.search(r"\.(\d+)\.", name)
        module = MODULES.get(name.rpartition(".")[2])
        if layer is None or module is None:
            raise ModelError(
                f"actor.lora: TensorRT-LLM does not support an adapter of {name}; supported in actor.lora.target_modules: "
                f"{', '.join(MODULES)}"
            )
        rows.append(np.concatenate([a.numpy().ravel(), b.numpy().ravel()]))
        config.append((module, int(layer[1]), a.shape[0]))
    attention = {name: {layer for module, layer, _ in config if module == MODULES[name]} for name in FUSED_ATTENTION}
    if len(set(map(frozenset, attention.values()))) > 1:
        raise ModelError(
            f"actor.lora.target_modules: TensorRT-LLM supports adapters of {', '.join(FUSED_ATTENTION)} only together; "
            f"found {', '.join(name for name in FUSED_ATTENTION if attention[name])}"
        )
    weights = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for index, row in enumerate(rows):
        weights[index, : len(row)] = row
    shapes = np.array(config, np.int32)
    digest = hashlib.blake2b(shapes.tobytes() + weights.tobytes(), digest_size=8).digest()
    # Some servers store the number as int64.
    return LoraTensors(weights, shapes, int.from_bytes(digest, "little") >> 1)
