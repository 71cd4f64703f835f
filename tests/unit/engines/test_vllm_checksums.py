"""Comparison of weights with the checksums of a vLLM server, against parameters fused, split and padded as vLLM does."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from numpy.typing import NDArray

from quartet.engines.vllm_checksums import compare
from quartet.weight_transfer.tensors import HostTensor

HEADS, KEY_VALUE_HEADS, HEAD, HIDDEN, VOCABULARY = 8, 2, 4, 32, 100
Arrays = dict[str, NDArray[np.float32]]


def checkpoint() -> Arrays:
    """Return the tensors of one layer, with biases as in Qwen2."""
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": (HEADS * HEAD,),
        "model.layers.0.self_attn.k_proj.bias": (KEY_VALUE_HEADS * HEAD,),
        "model.layers.0.self_attn.v_proj.bias": (KEY_VALUE_HEADS * HEAD,),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "model.layers.0.mlp.gate_proj.weight": (48, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (48, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, 48),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def checksums(arrays: Arrays, size: int) -> dict[str, str]:
    """Return the checksums of a server with tensor parallelism over ``size`` ranks."""
    layer = "model.layers.0."
    result = {}
    for rank in range(size):

        def rows(array: NDArray[np.float32], ranks: int = size, index: int = rank) -> NDArray[np.float32]:
            return np.split(array, ranks)[index]

        ranks = min(size, KEY_VALUE_HEADS)
        held = {"input_layernorm.weight": arrays[f"{layer}input_layernorm.weight"]}
        for kind in ("weight", "bias"):
            q, k, v = (arrays[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv")
            index = rank * ranks // size
            held[f"self_attn.qkv_proj.{kind}"] = np.concatenate([rows(q), rows(k, ranks, index), rows(v, ranks, index)])
        gate, up = (arrays[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up"))
        held["mlp.gate_up_proj.weight"] = np.concatenate([rows(gate), rows(up)])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            held[name] = np.split(arrays[layer + name], size, axis=1)[rank]
        padded = np.zeros((128, HIDDEN), np.float32)
        padded[:VOCABULARY] = arrays["model.embed_tokens.weight"]
        parameters = {layer + name: array for name, array in held.items()}
        parameters["model.embed_tokens.base_layer.weight"] = rows(padded)
        for name, array in parameters.items():
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            result[f"dp0:pp0:pcp0:tp{rank}:{name}"] = digest
    return result


def tensors(arrays: Arrays) -> dict[str, HostTensor]:
    return {name: HostTensor("F32", array.shape, array.reshape(-1).view(np.uint8)) for name, array in arrays.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_split_and_padded_parameters_prove_their_tensors(size: int) -> None:
    arrays = checkpoint()
    result = compare(tensors(arrays), checksums(arrays, size))
    assert result.equal == set(arrays)
    assert not result.different
    assert not result.unknown


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_changed_tensor_is_reported_with_those_in_the_same_parameter(size: int) -> None:
    arrays = checkpoint()
    expected = checksums(arrays, size)
    arrays["model.layers.0.self_attn.k_proj.weight"][-1, -1] += 1  # held by the last rank only
    arrays["model.layers.0.mlp.down_proj.weight"][0, 0] += 1
    result = compare(tensors(arrays), expected)
    assert {name.rpartition("layers.0.")[2] for name in result.different} == {
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.down_proj.weight",
    }


def test_a_parameter_that_the_server_does_not_show_is_unknown() -> None:
    arrays = checkpoint()
    shown = checksums(arrays, 1)
    shown["dp0:pp0:pcp0:tp0:model.layers.0.self_attn.o_proj.weight"] = hashlib.sha256(b"").hexdigest()
    del shown["dp0:pp0:pcp0:tp0:model.layers.0.mlp.gate_up_proj.weight"]
    result = compare(tensors(arrays), shown)
    assert not result.different
    assert {name.rpartition(".0.")[2] for name in result.unknown} == {
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    }


def test_one_wrong_replica_is_different() -> None:
    arrays = checkpoint()
    shown = checksums(arrays, 1)
    replica = {key.replace("dp0", "dp1"): value for key, value in shown.items()}
    replica["dp1:pp0:pcp0:tp0:model.layers.0.input_layernorm.weight"] = "0" * 64
    assert compare(tensors(arrays), shown | replica).different == {"model.layers.0.input_layernorm.weight"}
