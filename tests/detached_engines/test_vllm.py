"""vLLM: weights that do not arrive whole, its prefix cache, adapters, tensor parallelism, errors and its end."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from quartet.contract.generation import SamplingParameters
from quartet.engines import vllm as engine_module
from quartet.engines.engine import EngineResponse
from quartet.engines.vllm import VLLMEngine, VLLMSettings
from quartet.errors import ConfigError, ServiceFailed
from quartet.weight_transfer.tensors import AdapterSettings, WeightSet, combined_digest
from tests.detached_engines.reference import Arrays, Reference
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
SECONDS = 120.0


@pytest.fixture
def engine(vllm: BreakableVLLM) -> Iterator[BreakableVLLM]:
    """Return the session's engine with the first weights. Switch its faults off afterwards."""
    load(vllm, VALUES)
    yield vllm
    vllm.keep_prefix_cache = vllm.without_salt = False
    vllm.weights.load_fraction, vllm.weights.load_error = 1.0, ""


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
    engine.weights.load_fraction = fraction
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
        (
            {"worker_cls": "somewhere.Worker"},
            r"rollout\.vllm\.engine_arguments\.worker_cls: Quartet sets it",
        ),
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


def test_an_adapter_travels_alone_also_in_flight_and_ends_with_the_engine(folder: Path) -> None:
    engine = vllm_engine(folder)
    try:
        batch = requests(8, tokens=40)
        for version, seed in ((1, 5), (2, 6)):
            adapter = adapter_arrays(seed)
            weights = weight_set({**VALUES, **adapter}, version, ADAPTER)
            digests = engine.load_weights(weights, weights.tensors.keys() if version == 1 else adapter.keys())
            assert digests == expected_digests(weights)
            assert tokens(run(engine, batch, temperature=0.0)) == greedy(folder, merged(adapter), batch)
        former, before, adapter = adapter, weights, adapter_arrays(7)
        weights = weight_set({**VALUES, **adapter}, 3, ADAPTER)
        update = Update(engine, weights, changed=adapter)
        responses = update.run()
        digests = update.digests.result()
        assert digests == expected_digests(weights)
        references = (Reference(folder, merged(values)) for values in (former, adapter))
        check_parts(responses, *references, before, weights)
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


LONG = requests(3, tokens=12)
"""Requests of long responses: no stop token ends them."""


class Update:
    """An update that begins on another thread as soon as a generation has made some tokens."""

    def __init__(
        self, engine: BreakableVLLM, weights: WeightSet, after: int = 12, changed: Collection[str] | None = None
    ) -> None:
        """``changed`` names the tensors that change; all by default."""
        self._engine, self._weights, self._after = engine, weights, after
        self._changed = weights.tensors.keys() if changed is None else changed
        self.digests: Future[Mapping[str, bytes]] = Future()

    def run(self) -> list[EngineResponse]:
        """Return the greedy responses of a generation with this update in its middle."""
        states = self._engine._process.llm.output_processor.request_states
        sampling = SamplingParameters(100, temperature=0.0, ignore_eos=True)
        with ThreadPoolExecutor(1) as thread:
            responses = self._engine.generate(LONG, sampling, 0, lambda: False)
            generation = thread.submit(lambda: list(responses))
            while not generation.done() and not any(
                state.detokenizer.num_output_tokens() >= self._after for state in list(states.values())
            ):
                pass
            try:
                self.digests.set_result(self._engine.load_weights(self._weights, self._changed))
            except ServiceFailed as error:
                self.digests.set_exception(error)
            return generation.result(SECONDS)


def test_in_flight_updates_change_the_weights_in_the_middle_of_a_response(engine: BreakableVLLM, folder: Path) -> None:
    weights = weight_set(arrays(seed=4), version=2)
    update = Update(engine, weights)
    responses = update.run()
    assert update.digests.result() == expected_digests(weights)
    check_parts(responses, Reference(folder, VALUES), Reference(folder, arrays(seed=4)), weight_set(VALUES), weights)
    # The prompts of the next generation are computed by the new weights.
    assert tokens(run(engine, LONG, temperature=0.0)) == greedy(folder, arrays(seed=4), LONG)


def check_parts(
    responses: list[EngineResponse], former: Reference, newer: Reference, before: WeightSet, after: WeightSet
) -> None:
    """Check that the weights of greedy responses change from ``before`` to ``after`` where they say."""
    for response in responses:
        first, second = response.spans
        assert [(span.policy_version, span.weights_digest) for span in response.spans] == [
            (before.version, before.digest),
            (after.version, after.digest),
        ]
        assert first.tokens + second.tokens == len(response.token_ids) == 100
        assert response.log_probs is not None
        ids, old = list(response.token_ids), first.tokens
        assert ids[:old] == former.greedy(response.request, old, stop=-1)
        np.testing.assert_allclose(
            response.log_probs[:old], former.log_probs(response.request, ids, 1.0)[:old], atol=1e-3
        )
        continued = newer.continued(former, response.request, ids, old)
        assert ids[old:] == [row.argmax() for row in continued]
        assert not np.allclose(newer.log_probs(response.request, ids, 1.0)[old:], response.log_probs[old:], atol=1e-2)


def test_an_update_in_flight_that_arrives_in_part_ends_the_generation(engine: BreakableVLLM, folder: Path) -> None:
    weights = weight_set(arrays(seed=4), version=2)
    engine.weights.load_fraction = 0.5
    update = Update(engine, weights)
    with pytest.raises(ServiceFailed, match="version 2 did not arrive whole in the middle of a generation"):
        update.run()
    assert combined_digest(update.digests.result()) != weights.digest
    with pytest.raises(ServiceFailed, match="no weights"):
        engine.generate(LONG, SamplingParameters(4), 0, lambda: False)
    engine.weights.load_fraction = 1.0
    load(engine, arrays(seed=4), version=2)
    assert tokens(run(engine, LONG, temperature=0.0)) == greedy(folder, arrays(seed=4), LONG)


def test_an_update_in_flight_that_fails_ends_the_generation(engine: BreakableVLLM, folder: Path) -> None:
    values = arrays(seed=4)
    engine.weights.load_error = "no memory"
    update = Update(engine, weight_set(values, version=2))
    with pytest.raises(ServiceFailed, match="version 2 failed in the middle of a generation: no memory"):
        update.run()
    with pytest.raises(ServiceFailed, match="no memory"):
        update.digests.result()
    engine.weights.load_error = ""
    load(engine, values, version=2)
    assert tokens(run(engine, LONG, temperature=0.0)) == greedy(folder, values, LONG)


@pytest.fixture(scope="module")
def speculating(folder: Path) -> Iterator[VLLMEngine]:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = vllm_engine(folder, speculative=speculative)
    load(engine, VALUES)
    yield engine
    engine.close()


def test_n_gram_speculation_changes_no_greedy_token_and_no_digest(speculating: VLLMEngine, folder: Path) -> None:
    batch, reference = requests(8), Reference(folder, VALUES)
    responses = run(speculating, batch, temperature=0.0)
    assert tokens(responses) == greedy(folder, VALUES, batch)
    for response in responses:
        expected = reference.log_probs(response.request, list(response.token_ids), 1.0)
        assert np.allclose(np.asarray(response.log_probs), expected, atol=1e-3)
    assert speculating.held_digests(()) == expected_digests(weight_set(VALUES))


def test_a_cpu_speculates_for_no_sampled_response(speculating: VLLMEngine) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.speculative: at temperature 0\.7"):
        run(speculating, requests(1), temperature=0.7)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM on a CPU; check_speculation goes when this passes")
def test_sampled_responses_with_speculation_have_log_probs_of_the_policy(
    speculating: VLLMEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "check_speculation", lambda temperature: None)
    reference = Reference(folder, VALUES)
    for response in run(speculating, requests(8), temperature=0.7):
        expected = reference.log_probs(response.request, list(response.token_ids), 0.7)
        assert np.allclose(np.asarray(response.log_probs), expected, atol=1e-3)
