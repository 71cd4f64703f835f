"""Contract tests that every engine must pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import FinishReason, TokenBatch, Trajectory, TrajectoryId
from quartet.contrib.triton.engine import TritonEngine
from quartet.engines.engine import Engine, Policy
from quartet.errors import Cancelled, InvalidRequest
from quartet.models.generation.torch_engine import TorchEngine
from quartet.weight_transfer.tensors import WeightSet
from tests.engines.conftest import EOS, SEED, change_adapter, policy, score, trajectories
from tests.every_case import every_case
from tests.unit.models import tiny

ENGINES = (
    "torch",
    "torch-static",
    "triton-current",
    "triton-older",
    "triton-whole",
    "triton-older-whole",
    "triton-silent",
    "triton-text",
)


@pytest.fixture(scope="module")
def subject() -> Policy:
    """Return the policy that all engines share. A test that changes it restores it."""
    return policy()


@pytest.fixture(params=ENGINES, scope="module")
def engine(
    request: pytest.FixtureRequest, subject: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Return each engine in turn."""
    name: str = request.param
    result: Engine
    if name.startswith("torch"):
        result = TorchEngine(subject.model, subject.served.stop_ids, 32, static=name == "torch-static")
    else:
        from tests.engines.triton_engines import engine_of

        folder = tmp_path_factory.mktemp(name)
        result = engine_of(request.getfixturevalue("server"), name.removeprefix("triton-"), subject, folder)
    yield result
    result.close()


def requests(count: int, first: int = 0) -> list[GenerationRequest]:
    """Return requests with prompts of several lengths. The tests' server treats ids of 55 and more as faults."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 55, generator.integers(1, 9)).astype(np.int32) for _ in range(first + count)]
    return [GenerationRequest(TrajectoryId("run", 0, i, 0), prompts[i]) for i in range(first, first + count)]


def run(
    engine: Engine, batch: list[GenerationRequest], subject: Policy, seed: int = 0, **sampling: Any
) -> list[Trajectory]:
    """Generate, and return the trajectories in the order of their ids."""
    parameters = SamplingParameters(**{"max_response_tokens": 10, "temperature": 0.8, **sampling})
    return trajectories(engine.generate(batch, parameters, seed, lambda: False), subject, parameters, 7)


def tokens(result: list[Trajectory]) -> list[list[int]]:
    return [trajectory.response_ids.tolist() for trajectory in result]


def greedy(policy: Policy, request: GenerationRequest, limit: int = 10) -> list[int]:
    """Return the greedy response, computed without cache and batching."""
    ids = request.prompt_ids.tolist()
    for _ in range(limit):
        with torch.no_grad():
            ids.append(int(policy.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in policy.served.stop_ids:
            break
    return ids[len(request.prompt_ids) :]


def test_greedy_tokens_are_those_without_cache_and_batching(engine: Engine, subject: Policy) -> None:
    batch = requests(12)
    result = run(engine, batch, subject, temperature=0.0)
    assert tokens(result) == [greedy(subject, request) for request in batch]
    assert [t.id for t in result] == [r.id for r in batch]
    assert all((t.prompt_ids == r.prompt_ids).all() for t, r in zip(result, batch, strict=True))
    assert {t.policy_version for t in result} == {7}
    assert len({len(t.response_ids) for t in result}) > 1  # some stopped early


def test_log_probs_are_close_to_those_of_the_trainer(engine: Engine, subject: Policy) -> None:
    for temperature in (0.0, 0.7):
        result = run(engine, requests(8), subject, temperature=temperature)
        expected = score(subject, TokenBatch.of(result), temperature or 1.0)
        assert np.allclose(np.concatenate([t.log_probs for t in result]), expected, atol=1e-3)


def test_responses_depend_on_the_seed_and_not_on_the_batch(engine: Engine, subject: Policy) -> None:
    batch = requests(10)
    first = tokens(run(engine, batch, subject))
    assert tokens(run(engine, batch, subject)) == first
    assert tokens(run(engine, batch[3:6], subject)) == first[3:6]
    assert tokens(run(engine, batch, subject, seed=1)) != first


def test_samples_of_one_prompt_differ(engine: Engine, subject: Policy) -> None:
    prompt = requests(1)[0].prompt_ids
    batch = [GenerationRequest(TrajectoryId("run", 0, 0, sample), prompt) for sample in range(6)]
    assert len({tuple(response) for response in tokens(run(engine, batch, subject))}) > 1


def test_a_response_ends_with_its_stop_token_or_at_the_limit(engine: Engine, subject: Policy) -> None:
    result = run(engine, requests(30), subject, max_response_tokens=6)
    assert {t.finish_reason for t in result} == {FinishReason.EOS, FinishReason.LENGTH}
    for t in result:
        stops = [index for index, token in enumerate(t.response_ids) if token == EOS]
        stopped = t.finish_reason is FinishReason.EOS
        assert stops == ([len(t.response_ids) - 1] if stopped else [])
        assert stopped or len(t.response_ids) == 6
        assert len(t.log_probs) == len(t.response_ids)
        assert (t.response_ids.dtype, t.log_probs.dtype, t.prompt_ids.dtype) == (np.int32, np.float32, np.int32)


def test_stop_tokens_can_be_ignored(engine: Engine, subject: Policy, request: pytest.FixtureRequest) -> None:
    if "triton-text" in request.node.name:
        with pytest.raises(InvalidRequest, match="ignore_eos is not supported"):
            run(engine, requests(2), subject, ignore_eos=True)
        return
    assert {len(t.response_ids) for t in run(engine, requests(12), subject, ignore_eos=True)} == {10}


def test_new_weights_apply_to_the_next_generation(engine: Engine, subject: Policy) -> None:
    batch = requests(8)
    before = run(engine, batch, subject, temperature=0.0)
    for version, seed in enumerate((11, SEED), start=1):
        engine.sleep()
        change_adapter(subject.model, seed)
        engine.load_weights(WeightSet(version, b"", {}), [])
        after = run(engine, batch, subject, temperature=0.0)
        assert tokens(after) == [greedy(subject, request) for request in batch]
        assert (tokens(after) == tokens(before)) == (seed == SEED)


def test_the_engine_works_after_a_cancelled_generation(engine: Engine, subject: Policy) -> None:
    batch = requests(8)
    calls = iter([False, False])
    running = engine.generate(batch, SamplingParameters(40), 0, lambda: next(calls, True))
    with pytest.raises(Cancelled):
        list(running)
    assert len(run(engine, batch, subject)) == 8


def test_the_engine_works_after_a_caller_stops_reading(engine: Engine, subject: Policy) -> None:
    running = engine.generate(requests(8), SamplingParameters(20), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    assert len(run(engine, requests(4), subject)) == 4


@every_case(
    ("prompt", "limit", "message"),
    [
        ([3] * 60, 5, "positions for 64"),
        ([], 5, "at least one token"),
        ([3, tiny.VOCABULARY], 5, "vocabulary"),
        ([-1], 5, "vocabulary"),
        ([3], 0, "max_response_tokens"),
    ],
)
def test_an_invalid_request_is_refused_at_the_call(engine: Engine, prompt: list[int], limit: int, message: str) -> None:
    batch = [GenerationRequest(TrajectoryId("r", 0, 0, 0), np.array(prompt, np.int32))]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(batch, SamplingParameters(limit), 0, lambda: False)


def test_no_requests_give_no_trajectories(engine: Engine, subject: Policy) -> None:
    assert run(engine, [], subject) == []


def test_a_triton_engine_cancels_requests_on_the_server(
    engine: Engine, subject: Policy, request: pytest.FixtureRequest
) -> None:
    if not isinstance(engine, TritonEngine):
        pytest.skip("only for servers")
    server = request.getfixturevalue("server")
    before = server.count("tokens")
    running = engine.generate(requests(32), SamplingParameters(50, ignore_eos=False), 0, lambda: False)
    next(running)
    getattr(running, "close")()  # noqa: B009
    run(
        engine, requests(1), subject, max_response_tokens=1
    )  # The server runs this after requests that were not cancelled.
    assert server.count("tokens") - before < 32 * 10
