"""vLLM: weights that do not arrive whole, its prefix cache, adapters, tensor parallelism, errors and its end."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.errors import ConfigError, ServiceFailed
from quartet.types import SamplingParameters
from quartet.weight_transfer.digests import combined_digest
from quartet.weight_transfer.tensors import AdapterSettings
from tests.detached_engines.reference import Arrays
from tests.detached_engines.test_contract import greedy, load, requests, run, tokens
from tests.detached_engines.tiny_checkpoint import (
    LAYERS,
    adapter_arrays,
    arrays,
    expected_digests,
    served_model,
    weight_set,
    write_config,
)

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make engines", allow_module_level=True)

from tests.detached_engines.vllm_engine import BreakableVLLM, vllm_engine

VALUES = arrays(seed=1)
ADAPTER = AdapterSettings(4, 6.0, ("q_proj", "v_proj", "down_proj"))
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def engine(vllm: BreakableVLLM) -> Iterator[BreakableVLLM]:
    """Return the session's engine with the first weights. Switch its faults off afterwards."""
    load(vllm, VALUES)
    yield vllm
    vllm.keep_prefix_cache = vllm.without_salt = False
    vllm.load_fraction = 1.0


@pytest.mark.parametrize(
    ("module", "name", "tensor"),
    [
        ("model.embed_tokens", "weight", "model.embed_tokens.weight"),
        ("model.layers.1.input_layernorm", "weight", "model.layers.1.input_layernorm.weight"),
        ("model.layers.0.self_attn.qkv_proj", "weight", QUERY),
        ("model.layers.1.mlp.gate_up_proj", "weight", "model.layers.1.mlp.gate_proj.weight"),
        ("model.layers.1.mlp.down_proj", "weight", "model.layers.1.mlp.down_proj.weight"),
        ("lm_head", "weight", "lm_head.weight"),
    ],
)
def test_a_bit_that_changes_in_its_memory_changes_the_digest(
    engine: BreakableVLLM, module: str, name: str, tensor: str
) -> None:
    weights = weight_set(VALUES, version=2)
    engine.flip(module, name)
    digests = engine.load_weights(weights, ())
    assert {key for key, digest in expected_digests(weights).items() if digests[key] != digest} == {tensor}
    assert combined_digest(digests) != weights.digest


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9])
def test_an_update_that_is_dropped_or_half_applied_changes_the_digest(engine: BreakableVLLM, fraction: float) -> None:
    weights = weight_set(arrays(seed=2), version=2)
    engine.load_fraction = fraction
    assert combined_digest(engine.load_weights(weights, weights.tensors.keys())) != weights.digest


@pytest.mark.parametrize(
    ("keep_prefix_cache", "without_salt", "right"),
    [(True, True, False), (False, True, True), (True, False, True), (False, False, True)],
)
def test_a_stale_prefix_cache_is_never_used_with_a_reset_or_a_salt(
    engine: BreakableVLLM, folder: Path, keep_prefix_cache: bool, without_salt: bool, right: bool
) -> None:
    batch = requests(8, tokens=80)
    engine.keep_prefix_cache, engine.without_salt = keep_prefix_cache, without_salt
    run(engine, batch, temperature=0.0)
    values = arrays(seed=3)
    load(engine, values, version=2)
    assert (tokens(run(engine, batch, temperature=0.0)) == greedy(folder, values, batch)) is right


def test_the_prefix_cache_changes_no_response(engine: BreakableVLLM, folder: Path) -> None:
    batch = requests(8, tokens=80)
    first = run(engine, batch, temperature=0.0)
    second = run(engine, batch, temperature=0.0)
    assert tokens(first) == tokens(second) == greedy(folder, VALUES, batch)


def test_a_request_that_vllm_refuses_is_an_error_with_its_message(engine: BreakableVLLM) -> None:
    limited = engine._served
    engine._served = dataclasses.replace(limited, max_sequence_tokens=0)
    try:
        with pytest.raises(ServiceFailed, match=r"run/0/0/0.*128"):
            list(engine.generate(requests(1, tokens=200), SamplingParameters(4), 0, lambda: False))
    finally:
        engine._served = limited
    assert len(run(engine, requests(2))) == 2


def test_nothing_is_generated_before_weights_are_loaded(folder: Path) -> None:
    engine = VLLMEngine(VLLMSettings(16), served_model(folder))
    with pytest.raises(ServiceFailed, match="no weights"):
        engine.generate(requests(1), SamplingParameters(4), 0, lambda: False)
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"worker_cls": "somewhere.Worker"}, "worker_cls: Quartet sets it or excludes it"),
        ({"load_format": "auto"}, "load_format"),
        ({"blocksize": 32}, "blocksize: not an argument"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VLLMEngine(VLLMSettings(16, engine_arguments=arguments), served_model(folder))


def test_weights_of_another_type_are_refused(folder: Path) -> None:
    engine = VLLMEngine(VLLMSettings(16), served_model(folder, dtype="bfloat16"))
    weights = weight_set(VALUES)
    with pytest.raises(ConfigError, match="type F32, the engine BF16"):
        engine.load_weights(weights, weights.tensors.keys())
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"head_dim": 8}, "heads of size 8"), ({"architectures": ["MadeUpForCausalLM"]}, "MadeUpForCausalLM")],
)
def test_a_model_that_vllm_refuses_is_an_error_at_the_start(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    engine = VLLMEngine(VLLMSettings(16), served_model(write_config(tmp_path, **changes)))
    weights = weight_set(VALUES)
    with pytest.raises(ConfigError, match=message):
        engine.load_weights(weights, weights.tensors.keys())
    engine.close()


def merged(adapter: Arrays) -> Arrays:
    """Return the base weights plus the adapter's."""
    result = dict(VALUES)
    for name in adapter:
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            scaling = ADAPTER.alpha / ADAPTER.rank
            result[target] = result[target] + scaling * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
    return {name: values.astype(np.float32) for name, values in result.items()}


def test_an_adapter_travels_alone_and_ends_with_the_engine(folder: Path) -> None:
    engine = vllm_engine(folder)
    try:
        batch = requests(8, tokens=40)
        for version, seed in ((1, 5), (2, 6)):
            adapter = adapter_arrays(seed)
            weights = weight_set({**VALUES, **adapter}, version, ADAPTER)
            digests = engine.load_weights(weights, weights.tensors.keys() if version == 1 else adapter.keys())
            assert digests == expected_digests(weights)
            assert tokens(run(engine, batch, temperature=0.0)) == greedy(folder, merged(adapter), batch)
        engine.flip_adapter("model.layers.1.mlp.down_proj")
        reread = engine.adapter_digests()
        changed = f"base_model.model.model.layers.{LAYERS - 1}.mlp.down_proj.lora_B.weight"
        assert [name for name in adapter if reread[name] != digests[name]] == [changed]
        core = engine.core_process()
        core.kill()
        with pytest.raises(ServiceFailed, match="EngineCore"):
            run(engine, batch)
        with pytest.raises(ServiceFailed, match="EngineCore"):
            engine.load_weights(weights, ())
    finally:
        engine.close()
    assert not core.is_alive()


def test_two_ranks_and_tied_weights(tmp_path: Path) -> None:
    folder = write_config(tmp_path, tie_word_embeddings=True)
    engine = vllm_engine(folder, tensor_parallel_size=2)
    try:
        values = arrays(1, tied=True)
        load(engine, values)
        batch = requests(6)
        assert tokens(run(engine, batch, temperature=0.0)) == greedy(folder, values, batch)
        for name in ("model.embed_tokens.weight", QUERY, "model.layers.1.mlp.down_proj.weight"):
            values = {**values, name: arrays(2, tied=True)[name]}
            load(engine, values, {name}, version=2)
            assert tokens(run(engine, batch, temperature=0.0)) == greedy(folder, values, batch)
        for module in ("lm_head", "model.layers.0.self_attn.o_proj", "model.norm"):
            engine.flip(module, "weight")
            weights = weight_set(values, 3)
            assert combined_digest(engine.load_weights(weights, ())) != weights.digest
            load(engine, values)
        core = engine.core_process()
    finally:
        engine.close()
    assert not core.is_alive()
    assert not engine._folder.exists()
