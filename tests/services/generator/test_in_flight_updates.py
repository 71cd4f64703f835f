"""The generator: new weights in the middle of responses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import Trajectory, VersionSpan
from quartet.engines.engine import EngineResponse
from quartet.errors import ComputationFailed, MismatchError, ServiceFailed
from quartet.services.generator.generator import Generator
from tests.services.generator.test_generator import SAMPLING, batch, generator_of, load, no_pull, weight_set
from tests.services.generator.test_generator import stream as stream
from tests.services.in_flight_engine import SECONDS, InFlightEngine, token

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
