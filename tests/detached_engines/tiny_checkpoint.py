"""A tiny Llama in the formats of the weight transfer, without torch. Head size 32 is the smallest of vLLM's CPU attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quartet.engines.engine import ServedModel
from quartet.weight_transfer.tensors import AdapterSettings, HostTensor, WeightSet, combined_digest, tensor_digest

VOCABULARY = 96
STOP = 7
"""The only stop token."""
LAYERS = 2
HIDDEN, INTERMEDIATE, HEADS, KEY_VALUE_HEADS, HEAD = 128, 192, 4, 2, 32
POSITIONS = 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_VALUE_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write config.json, and nothing else: the weights come over the engine's interface."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    return folder


def served_model(folder: Path, **changes: Any) -> ServedModel:
    """Return the description of the model in ``folder``."""
    fields = {"dtype": "float32", "stop_ids": frozenset({STOP}), "vocabulary_size": VOCABULARY}
    return ServedModel(model=str(folder), **{**fields, "max_sequence_tokens": POSITIONS, **changes})


def shapes(tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint."""
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        result["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            result[f"{prefix}.{name}.weight"] = (HIDDEN,)
        for name, rows in (("q", HEADS), ("k", KEY_VALUE_HEADS), ("v", KEY_VALUE_HEADS)):
            result[f"{prefix}.self_attn.{name}_proj.weight"] = (rows * HEAD, HIDDEN)
        result[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        for name in ("gate", "up"):
            result[f"{prefix}.mlp.{name}_proj.weight"] = (INTERMEDIATE, HIDDEN)
        result[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    return result


def arrays(seed: int, tied: bool = False) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return random weights, float32. Their logits differ enough for greedy tokens not to depend on rounding."""
    generator = np.random.default_rng(seed)
    result = {}
    for name, shape in shapes(tied).items():
        values = generator.normal(0.0, 0.12, shape) if len(shape) == 2 else generator.normal(1.0, 0.1, shape)
        result[name] = values.astype(np.float32)
    # Some responses end early, including greedy ones.
    result["model.embed_tokens.weight" if tied else "lm_head.weight"][STOP] *= 1.6
    return result


def adapter_arrays(seed: int, rank: int = 4) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return an adapter of q, v and down, by PEFT's names."""
    generator = np.random.default_rng(seed)
    result = {}
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
            rows, columns = shapes()[f"model.layers.{layer}.{name}.weight"]
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            result[f"{prefix}.lora_A.weight"] = generator.normal(0.0, 0.15, (rank, columns)).astype(np.float32)
            result[f"{prefix}.lora_B.weight"] = generator.normal(0.0, 0.15, (rows, rank)).astype(np.float32)
    return result


def host_tensor(values: np.ndarray[Any, Any]) -> HostTensor:
    return HostTensor("F32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def weight_set(
    values: Mapping[str, np.ndarray[Any, Any]], version: int = 1, adapter: AdapterSettings | None = None
) -> WeightSet:
    """Return the weights of a policy version."""
    tensors = {name: host_tensor(array) for name, array in values.items()}
    digest = combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
    return WeightSet(version, digest, tensors, adapter)


def expected_digests(weights: WeightSet) -> dict[str, bytes]:
    return {name: tensor_digest(tensor) for name, tensor in weights.tensors.items()}
