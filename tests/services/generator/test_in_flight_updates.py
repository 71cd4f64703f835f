"""The generator: new weights in the middle of responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.generation import GenerationBatch
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Trajectory, VersionSpan
from quartet.engines.engine import EngineResponse
from quartet.errors import ComputationFailed, FailedPrecondition, MismatchError, ServiceFailed
from quartet.models.generation import torch_engine
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.services.generator.generator import FLUSH, Generator
from quartet.weight_transfer.receiver import PulledWeights
from tests.services.generator.test_generator import SAMPLING, batch, generator_of, load, no_pull, weight_set
from tests.services.generator.test_generator import stream as stream
from tests.services.in_flight_engine import SECONDS, InFlightEngine, token
from tests.unit.models import tiny
from tests.unit.models.adapters import weight_set as weights_of

LONG = replace(SAMPLING, max_response_tokens=6)


@pytest.fixture
def engine() -> InFlightEngine:
    return InFlightEngine()


@pytest.fixture
def generator(engine: InFlightEngine, stream: RolloutStream) -> Generator:
    return generator_of(engine, stream)  # type: ignore[arg-type]


@pytest.fixture
def thread(engine: InFlightEngine) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor
        engine.resume()


def begin(generator: Generator, engine: InFlightEngine, thread: ThreadPoolExecutor, version: int) -> Future[Any]:
    """Begin to generate with a version, and wait until the responses have 2 tokens."""
    request = replace(batch(version, weight_set(version).digest), sampling=LONG)
    result = thread.submit(generator.generate, request, lambda: False)
    assert engine.paused.wait(SECONDS)
    return result


def written(stream: RolloutStream) -> list[Trajectory]:
    return [delivery.trajectory for delivery in stream.read(10, 0.01)]


def test_each_part_of_a_response_names_the_weights_that_generated_it(
    generator: Generator, engine: InFlightEngine, stream: RolloutStream, thread: ThreadPoolExecutor
) -> None:
    former = load(generator, 3)
    generation = begin(generator, engine, thread, 3)
    newer = load(generator, 5)
    engine.resume()
    assert generation.result(SECONDS) == (3, 18)
    assert engine.loads == [(3, False), (5, True)]
    for item in written(stream):
        assert item.version_spans == (VersionSpan(3, former, 2), VersionSpan(5, newer, 4))
        assert (item.policy_version, item.weights_digest) == (5, newer)
        assert item.response_ids.tolist() == [token(former if i < 2 else newer, i) for i in range(6)]
        assert item.log_probs.tolist() == [-4, -4, -6, -6, -6, -6]


def test_a_response_of_one_version_has_no_parts(generator: Generator, stream: RolloutStream) -> None:
    digest = load(generator, 3)
    generator._engine.resume()  # type: ignore[attr-defined]
    generator.generate(batch(3, digest), lambda: False)
    assert {(item.policy_version, item.weights_digest, item.version_spans) for item in written(stream)} == {
        (3, digest, ())
    }


def test_responses_that_begin_after_the_update_are_of_the_newer_version(
    stream: RolloutStream, thread: ThreadPoolExecutor
) -> None:
    engine = InFlightEngine(pause_at=0)
    generator = generator_of(engine, stream)  # type: ignore[arg-type]
    load(generator, 3)
    generation = begin(generator, engine, thread, 3)
    newer = load(generator, 5)
    engine.resume()
    generation.result(SECONDS)
    assert {(item.policy_version, item.weights_digest, item.version_spans) for item in written(stream)} == {
        (5, newer, ())
    }


def test_equal_weights_of_two_versions_are_named_as_requested(generator: Generator, stream: RolloutStream) -> None:
    digest = load(generator, 3)
    assert generator.load("generator", 1, 4, digest, no_pull).policy_version == 4
    generator._engine.resume()  # type: ignore[attr-defined]
    generator.generate(batch(4, digest), lambda: False)
    assert {item.policy_version for item in written(stream)} == {4}


def test_responses_by_an_update_that_did_not_arrive_whole_are_discarded(
    generator: Generator, engine: InFlightEngine, stream: RolloutStream, thread: ThreadPoolExecutor
) -> None:
    load(generator, 1)
    generation = begin(generator, engine, thread, 1)
    engine.lost = {"a"}
    with pytest.raises(MismatchError, match="after it loaded version 2"):
        load(generator, 2)
    engine.resume()
    with pytest.raises(MismatchError, match=r"4 tokens of generator/1/4/0 are of version 2 .* could not verify"):
        generation.result(SECONDS)
    assert written(stream) == []


def test_responses_wait_until_an_update_is_verified(
    generator: Generator, engine: InFlightEngine, stream: RolloutStream, thread: ThreadPoolExecutor
) -> None:
    load(generator, 1)
    generation = begin(generator, engine, thread, 1)
    check = generator._check_held

    def slow(*arguments: Any) -> None:
        # The engine generates already.
        engine.resume()
        with pytest.raises(TimeoutError):
            generation.result(0.2)
        check(*arguments)

    generator._check_held = slow  # type: ignore[method-assign]
    load(generator, 2)
    assert generation.result(SECONDS) == (3, 18)
    assert {item.policy_version for item in written(stream)} == {2}


def test_an_update_that_fails_in_flight_ends_the_generation(
    generator: Generator, engine: InFlightEngine, thread: ThreadPoolExecutor
) -> None:
    load(generator, 1)
    generation = begin(generator, engine, thread, 1)
    engine.failure = ServiceFailed("no memory")
    with pytest.raises(ServiceFailed, match="no memory"):
        load(generator, 2)
    engine.resume()
    with pytest.raises(ServiceFailed, match="an update failed: no memory"):
        generation.result(SECONDS)


@pytest.mark.parametrize("counts", [(1,), (1, 2), (2, 0), (3, -1)])
def test_parts_that_do_not_cover_a_response_are_an_error(
    counts: tuple[int, ...], generator: Generator, engine: InFlightEngine
) -> None:
    digest = load(generator, 1)
    spans = tuple(VersionSpan(1, digest, count) for count in counts)

    def generate(requests: Any, *_: Any) -> Iterator[EngineResponse]:
        yield EngineResponse(requests[0], [3, 4], [-1.0, -2.0], spans)

    engine.generate = generate  # type: ignore[method-assign]
    with pytest.raises(ComputationFailed, match="versions of the weights for"):
        generator.generate(batch(1, digest), lambda: False)


class Written:
    """A rollout stream in memory, with a function that is called after each write."""

    def __init__(self) -> None:
        self.items: list[Trajectory] = []
        self.after: Callable[[], object] = lambda: None

    def append(self, items: Sequence[Trajectory], leader_epoch: int = 0) -> None:
        self.items += items
        self.after()


class TorchGenerator(Generator):
    """A generator with the torch engine and two versions, of which it has loaded the first."""

    def __init__(self) -> None:
        self.sets = {version: weights_of(tiny.causal("llama", seed=version), version=version) for version in (1, 2)}
        self.torch, self.written = DetachedTorchEngine(tiny.causal("llama"), None, frozenset(), 8), Written()
        served = torch_engine.served_model(self.torch._model)
        stream: Any = self.written
        super().__init__(lambda: self.torch, served, ServiceStatus(Role.GENERATOR), lambda run: stream)
        self.load_version(1)

    def load_version(self, version: int) -> None:
        weights = self.sets[version]
        pulled = PulledWeights(weights, b"", frozenset(weights.tensors), 0, 0.0, "actor", "full")
        self.load("run", 1, version, weights.digest, lambda: pulled)

    def batch(self, version: int, requests: int = 2) -> GenerationBatch:
        sampling = replace(LONG, ignore_eos=True)
        digest = self.sets[version].digest
        return GenerationBatch("run", 1, 1, tiny.requests(requests), sampling, 0, version, digest, "me:1")

    def take(self) -> set[tuple[Any, ...]]:
        items, self.written.items = self.written.items, []
        return {(item.policy_version, item.weights_digest, item.version_spans) for item in items}


@pytest.mark.parametrize("updated", [False, True])
def test_the_torch_engine_names_an_update_between_the_check_of_a_request_and_its_first_token(updated: bool) -> None:
    generator = TorchGenerator()
    generator.generate(generator.batch(1), lambda: False, lambda: generator.load_version(2) if updated else None)
    version = 2 if updated else 1
    assert generator.take() == {(version, generator.sets[version].digest, ())}


def test_a_held_version_of_the_torch_engine_keeps_the_number_of_the_request() -> None:
    generator = TorchGenerator()
    digest = generator.sets[1].digest
    generator.load("run", 1, 2, digest, no_pull)
    generator.generate(replace(generator.batch(1), policy_version=2), lambda: False)
    assert generator.take() == {(2, digest, ())}


def test_what_was_generated_before_an_update_that_fails_stays_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, real = TorchGenerator(), torch_engine.load_tensors

    def partly(targets: Any, tensors: Any, changed: Any) -> Any:
        names = sorted(changed)[:-1]
        real({name: targets[name] for name in names}, tensors, names)
        raise RuntimeError("out of memory")

    def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch_engine, "load_tensors", partly)
            with pytest.raises(RuntimeError, match="out of memory"):
                generator.load_version(2)

    # The update fails after the last token, before the weights are read back.
    generator.written.after = fail
    assert generator.generate(generator.batch(1, FLUSH), lambda: False) == (FLUSH, 6 * FLUSH)
    assert generator.take() == {(1, generator.sets[1].digest, ())}
    with pytest.raises(FailedPrecondition, match="holds none"):
        generator.generate(generator.batch(1), lambda: False)
    generator.written.after = lambda: None
    generator.load_version(2)
    generator.generate(generator.batch(2), lambda: False)
    assert generator.take() == {(2, generator.sets[2].digest, ())}
