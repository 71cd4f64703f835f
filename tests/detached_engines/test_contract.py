"""Contract tests that every engine with its own weights must pass, in the engine's own environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.contract.generation import GenerationRequest, Penalties, SamplingParameters
from quartet.contract.trajectory import TrajectoryId
from quartet.engines.engine import Engine, EngineResponse
from quartet.errors import Cancelled, InvalidRequest
from quartet.weight_transfer.tensors import combined_digest
from tests.detached_engines.reference import Arrays, Reference
from tests.detached_engines.tiny_checkpoint import STOP, VOCABULARY, arrays, expected_digests, weight_set

VALUES = arrays(seed=1)


def requests(count: int, tokens: int = 0) -> list[GenerationRequest]:
    """Return requests with prompts of several lengths, or of one."""
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(8, VOCABULARY, tokens or generator.integers(1, 20)).astype(np.int32) for _ in range(count)
    ]
    return [GenerationRequest(TrajectoryId("run", 0, i, 0), prompt) for i, prompt in enumerate(prompts)]


def load(engine: Engine, values: Arrays, changed: set[str] | None = None, version: int = 1) -> None:
    """Load weights and check that the engine holds them."""
    weights = weight_set(values, version)
    digests = engine.load_weights(weights, weights.tensors.keys() if changed is None else changed)
    assert digests == expected_digests(weights)
    assert combined_digest(digests) == weights.digest


def run(engine: Engine, batch: list[GenerationRequest], seed: int = 0, **sampling: Any) -> list[EngineResponse]:
    """Generate, and return the responses in the order of their ids."""
    parameters = SamplingParameters(**{"max_response_tokens": 10, "temperature": 0.8, **sampling})
    return sorted(engine.generate(batch, parameters, seed, lambda: False), key=lambda response: response.request.id)


def tokens(responses: list[EngineResponse]) -> list[list[int]]:
    return [list(response.token_ids) for response in responses]


def greedy(folder: Path, values: Arrays, batch: list[GenerationRequest], limit: int = 10) -> list[list[int]]:
    reference = Reference(folder, values)
    return [reference.greedy(request, limit, STOP) for request in batch]


@pytest.fixture(autouse=True)
def _weights(engine: Engine) -> None:
    load(engine, VALUES)


def log_probs(response: EngineResponse) -> list[float]:
    """Return the log-probs of a response; none if the engine reports none."""
    return [] if response.log_probs is None else [float(value) for value in response.log_probs]


def test_greedy_tokens_are_those_without_cache_and_batching(engine: Engine, folder: Path) -> None:
    batch = requests(12)
    responses = run(engine, batch, temperature=0.0)
    assert tokens(responses) == greedy(folder, VALUES, batch)
    assert [response.request for response in responses] == batch
    assert len({len(response.token_ids) for response in responses}) > 1  # some stopped early


@pytest.mark.parametrize("penalties", [Penalties(frequency=-1.0), Penalties(1.2, 0.5, 0.5)])
def test_greedy_tokens_with_penalties_are_those_of_the_formulas(
    engine: Engine, folder: Path, penalties: Penalties
) -> None:
    batch, reference = requests(8), Reference(folder, VALUES)
    responses = run(engine, batch, temperature=0.0, penalties=penalties, ignore_eos=True)
    assert tokens(responses) == [reference.greedy(request, 10, -1, penalties) for request in batch]
    assert tokens(responses) != tokens(run(engine, batch, temperature=0.0, ignore_eos=True))
    for response in responses:
        if response.log_probs is not None:
            expected = reference.log_probs(response.request, list(response.token_ids), 1.0)
            assert np.allclose(response.log_probs, expected, atol=1e-3)


def test_log_probs_are_those_of_the_whole_distribution_at_the_temperature(engine: Engine, folder: Path) -> None:
    if engine.properties.log_probs != "whole":
        pytest.skip("reports no log-probs of the whole distribution")
    reference = Reference(folder, VALUES)
    for temperature in (0.0, 0.7, 1.0):
        for response in run(engine, requests(8), temperature=temperature):
            expected = reference.log_probs(response.request, list(response.token_ids), temperature or 1.0)
            assert response.log_probs is not None
            assert np.allclose(response.log_probs, expected, atol=1e-3)


def test_a_truncated_distribution_gives_no_log_probs_or_those_of_the_whole(engine: Engine, folder: Path) -> None:
    reference = Reference(folder, VALUES)
    for truncation in ({"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}):
        for response in run(engine, requests(6), **truncation):
            if response.log_probs is not None:
                expected = reference.log_probs(response.request, list(response.token_ids), 0.8)
                assert np.allclose(response.log_probs, expected, atol=1e-3)


def test_top_k_1_is_greedy(engine: Engine) -> None:
    batch = requests(8)
    assert tokens(run(engine, batch, top_k=1)) == tokens(run(engine, batch, temperature=0.0))
    if engine.properties.name != "tensorrt-llm":
        assert tokens(run(engine, batch, min_p=1.0)) == tokens(run(engine, batch, temperature=0.0))


def test_the_seed_decides_the_response(engine: Engine) -> None:
    if not engine.properties.seeded:
        pytest.skip("takes no seed")
    batch = requests(10)
    first = tokens(run(engine, batch))
    assert tokens(run(engine, batch)) == first
    assert tokens(run(engine, batch, seed=1)) != first


def test_samples_of_one_prompt_differ(engine: Engine) -> None:
    prompt = requests(1)[0].prompt_ids
    batch = [GenerationRequest(TrajectoryId("run", 0, 0, sample), prompt) for sample in range(6)]
    assert len({tuple(response) for response in tokens(run(engine, batch))}) > 1


def test_company_changes_no_bit_if_the_engine_says_so(engine: Engine) -> None:
    if not engine.properties.batch_invariant:
        pytest.skip("not batch-invariant")
    batch = requests(10)
    together = run(engine, batch)
    single = [response for request in batch for response in run(engine, [request])]
    assert tokens(single) == tokens(together)
    assert [log_probs(r) for r in single] == [log_probs(r) for r in together]


def test_a_response_ends_with_its_stop_token_or_at_the_limit(engine: Engine) -> None:
    responses = tokens(run(engine, requests(60), max_response_tokens=12))
    for response in responses:
        stops = [index for index, token in enumerate(response) if token == STOP]
        assert stops == [len(response) - 1] or (stops == [] and len(response) == 12)
    assert len({response[-1] == STOP for response in responses}) == 2


def test_stop_tokens_can_be_ignored(engine: Engine) -> None:
    responses = run(engine, requests(60), max_response_tokens=12, ignore_eos=True)
    assert {len(response.token_ids) for response in responses} == {12}
    assert any(STOP in response.token_ids[:-1] for response in responses)


def test_new_weights_apply_to_the_next_generation(engine: Engine, folder: Path) -> None:
    batch = requests(8, tokens=70)
    before = run(engine, batch, temperature=0.0)
    values = arrays(seed=2)
    load(engine, values, version=2)
    after = run(engine, batch, temperature=0.0)
    assert tokens(after) == greedy(folder, values, batch)
    assert tokens(after) != tokens(before)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_changed_tensor_is_enough(engine: Engine, folder: Path, name: str) -> None:
    values = {**VALUES, name: arrays(seed=2)[name]}
    load(engine, values, {name}, version=2)
    batch = requests(4)
    assert tokens(run(engine, batch, temperature=0.0)) == greedy(folder, values, batch)


def test_a_version_without_changes_loads(engine: Engine) -> None:
    load(engine, VALUES, set(), version=2)
    assert len(run(engine, requests(2))) == 2


def test_zeros_keep_their_sign_in_the_digest(engine: Engine) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    values = {**VALUES, name: VALUES[name].copy()}
    values[name][3, :5] = -0.0
    values[name][4, :5] = 0.0
    load(engine, values, {name}, version=2)


def test_the_engine_works_after_a_cancelled_generation(engine: Engine) -> None:
    batch = requests(8)
    calls = iter([False, False])
    running = engine.generate(batch, SamplingParameters(100, ignore_eos=True), 0, lambda: next(calls, True))
    with pytest.raises(Cancelled):
        list(running)
    load(engine, VALUES, set())  # No request of the cancelled generation holds a block of the cache.
    assert len(run(engine, batch)) == 8


def test_the_engine_works_after_a_caller_stops_reading(engine: Engine) -> None:
    running = engine.generate(requests(8), SamplingParameters(60), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    load(engine, VALUES, set())
    assert len(run(engine, requests(4))) == 4


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([9] * 126, 5, "positions for 128"),
        ([], 5, "at least one token"),
        ([9, VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([9], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(engine: Engine, prompt: list[int], limit: int, message: str) -> None:
    batch = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(batch, SamplingParameters(limit), 0, lambda: False)


def test_no_requests_give_no_responses(engine: Engine) -> None:
    assert run(engine, []) == []


def test_sleep_is_followed_by_the_same_responses(engine: Engine) -> None:
    batch = requests(4)
    before = tokens(run(engine, batch))
    engine.sleep()
    engine.sleep()
    assert tokens(run(engine, batch)) == before


def test_a_greedy_request_is_greedy_among_sampled_ones(engine: Engine, folder: Path) -> None:
    batch = requests(9)
    mixed = [dataclasses.replace(request, greedy=index % 3 == 0) for index, request in enumerate(batch)]
    responses = run(engine, mixed)
    assert tokens(responses[::3]) == greedy(folder, VALUES, batch)[::3]
    reference = Reference(folder, VALUES)
    for response in responses[::3]:
        if response.log_probs is not None:
            expected = reference.log_probs(response.request, list(response.token_ids), 1.0)
            assert np.allclose(response.log_probs, expected, atol=1e-3)
