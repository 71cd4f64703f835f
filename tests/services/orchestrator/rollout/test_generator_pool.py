"""A pool of generators with real servers: split of the work, lost and late generators, sources of the weights."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from quartet.config.rollout import VLLMConfig
from quartet.contract.generation import EngineProperties, GenerationBatch, requests_of
from quartet.contract.status import GeneratorState
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.errors import BufferFailed, Cancelled, ComputationFailed, InvalidRequest, QuartetError, ServiceUnavailable
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.preflight import generator_check
from quartet.rpc.clients import GenerationClient
from quartet.services.generator.generator import Generator
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.generator_pool import MAX_FAILURES
from quartet.services.orchestrator.rollout.generator_work import RemoteGenerator
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from tests.services.orchestrator.fake_services import Scorer
from tests.services.orchestrator.rollout.generator_pools import (
    PROMPTS,
    SAMPLES,
    SAMPLING,
    SECONDS,
    Gate,
    Generators,
    contents,
    prompts_by_generator,
    wait,
)
from tests.waiting import wait_until


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_generators_changes_only_who_generates(generators: Generators, count: int) -> None:
    addresses = [generators.start() for _ in range(count)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == count)
        result = generators.step(pool)
    assert contents(result) == contents(generators.by_the_actor())
    assert Counter(map(tuple, prompts_by_generator(result).values())) == Counter(
        tuple(range(part, len(PROMPTS), count)) for part in range(count)
    )
    assert {item.weights_digest for item in result} == set(generators.actor.status().published_weights.values())


def test_the_work_of_a_lost_generator_is_generated_by_the_others(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, gate = [generators.start() for _ in range(2)], Gate(monkeypatch)
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        _, work = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        with pool.lock:
            calls = {member.address: member.call for member in pool._all() if member.work is not None}
        [lost] = [address for address, call in calls.items() if not finishes(call)]
        generators.lose(lost)
        wait(work)
        assert work.result() == len(PROMPTS) * SAMPLES
        result = generators.read()
        assert {item.generator for item in result} == {*addresses} - {lost}
        assert contents(result) == contents(generators.by_the_actor())
        # It comes back at its address, and gets its part of the next step.
        generators.start(lost)
        wait_until(lambda: len(pool.statuses()) == 2)
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {*addresses}


def finishes(call: Any) -> bool:
    """Wait until a call ends, or has been silent for a second. Return whether it ended."""
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    return ended.wait(1.0)


def test_a_trajectory_that_has_arrived_is_not_generated_again(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = generators.start(), generators.start()
    gate = Gate(monkeypatch)
    with generators.pool(first) as pool:
        _, work = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        arrived = [TrajectoryId(generators._run, 1, 0, 0), TrajectoryId(generators._run, 1, 1, 1)]
        for id in arrived:
            work.arrived(Trajectory.of_response(id, 0, *[np.zeros(1, np.int32)] * 2, np.zeros(1, np.float32), None))  # type: ignore[arg-type]
        pool._by_address[second] = RemoteGenerator(GenerationClient(second, generators.actor.timeouts))
        pool._ask(pool._by_address[second])
        wait_until(lambda: len(pool.statuses()) == 2)
        generators.lose(first)
        wait(work)
        result = [item.id for item in generators.read()]
    assert result == [
        request.id for request in requests_of(generators._run, 1, PROMPTS, SAMPLES) if request.id not in arrived
    ]


def test_late_generators_take_the_weights_from_the_actor_and_from_generators_that_have_them(
    generators: Generators,
) -> None:
    first, *late = [generators.start() for _ in range(4)]
    for address in late:
        generators.lose(address)
    with generators.pool(first, *late) as pool:
        assert prompts_by_generator(generators.step(pool)).keys() == {first}
        for address in late:
            generators.start(address)
        wait_until(lambda: len(pool.statuses()) == 4)
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {first, *late}
        transfers = {address: member.client.status().last_transfer for address, member in pool._by_address.items()}
    actor = f"actor at {generators.actor.channel.address}"
    assert transfers[first].source == actor
    # The actor sends a version to two generators at a time.
    assert sorted(transfers[address].source for address in late) == sorted([actor, actor, f"generator at {first}"])


def test_idle_generators_load_a_published_policy_at_once(generators: Generators) -> None:
    addresses = [generators.start() for _ in range(2)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        publication = generators.actor.status().last_publication
        assert publication is not None
        pool.policy_updated(1, publication)
        wait_until(lambda: {member.digest for member in pool._all()} == {publication.weights_digest})
        pool.policy_updated(1, publication)
        assert prompts_by_generator(generators.step(pool)).keys() == {*addresses}
        metrics = pool.take_metrics(0)
        # These generators take no shared memory.
        ways = ("full", "delta", "shared_memory", "cuda_ipc")
        assert [metrics[f"weight_transfers_{way}"] for way in ways] == [2, 0, 0, 0]
        assert contents(generators.read()) == []


def test_an_idle_generator_that_cannot_load_a_policy_gets_work_once_it_can(generators: Generators) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        publication = generators.actor.status().last_publication
        assert publication is not None
        pool.policy_updated(1, replace(publication, weights_digest=bytes(16)))
        [member] = pool._all()
        wait_until(lambda: member.last_error != "" and member.update is None)
        assert member.failures == 0
        assert prompts_by_generator(generators.step(pool)).keys() == {address}


def test_an_idle_engine_that_shares_its_device_with_training_stays_asleep(generators: Generators) -> None:
    rollout = generators.config.rollout.model_copy(update={"vllm": VLLMConfig(release_memory=True)})
    generators.config = generators.config.model_copy(update={"rollout": rollout})
    with generators.pool(generators.start()) as pool:
        pool.policy_updated(1, generators.actor.status().last_publication)
        [member] = pool._all()
        assert (member.update, member.digest) == (None, b"")


def test_without_any_generator_the_work_fails(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, gate = [generators.start() for _ in range(2)], Gate(monkeypatch, count=2)
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        _, work = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        for address in addresses:
            generators.lose(address)
        wait(work)
        with pytest.raises(ServiceUnavailable, match="none is ready"):
            work.result()


def fail_generations(monkeypatch: pytest.MonkeyPatch, error: type[QuartetError], count: int) -> None:
    """Let the first ``count`` generations fail."""
    numbers, generate = itertools.count(1), DetachedTorchEngine.generate

    def failing(*arguments: Any) -> Iterator[Any]:
        if next(numbers) <= count:
            raise error("this engine cannot")
        return generate(*arguments)

    monkeypatch.setattr(DetachedTorchEngine, "generate", failing)


@pytest.mark.parametrize(("error", "count"), [(ComputationFailed, 1), (InvalidRequest, 2)])
def test_a_failure_of_every_generator_ends_the_work_and_names_them(
    error: type[QuartetError], count: int, generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_generations(monkeypatch, error, 100)
    addresses = [generators.start() for _ in range(count)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == count)
        _, work = generators.begin(pool)
        wait(work)
        with pytest.raises(error, match="this engine cannot") as raised:
            work.result()
        assert all(address in str(raised.value) for address in addresses)
        assert not generators.notes


@pytest.mark.parametrize(("error", "seeded"), [(ComputationFailed, True), (InvalidRequest, False)])
def test_the_work_of_a_generator_with_a_defect_continues_on_another(
    error: type[QuartetError], seeded: bool, generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = EngineProperties("torch", seeded, seeded, "whole", "tensors", "read back")
    monkeypatch.setattr(DetachedTorchEngine, "properties", property(lambda engine: properties))
    fail_generations(monkeypatch, error, 1)
    addresses = [generators.start() for _ in range(2)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        result = generators.step(pool)
        assert len({item.generator for item in result}) == 1
        assert contents(result) == contents(generators.by_the_actor())
        # It may do the next step: the cause may have been the work.
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {*addresses}


def test_failures_before_a_reconnect_do_not_refuse_a_generator(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        fail_generations(monkeypatch, ComputationFailed, MAX_FAILURES + 1)
        for step in range(1, MAX_FAILURES + 2):
            _, work = generators.begin(pool, step)
            wait(work)
        wait_until(lambda: pool.generators()[0].reason)
        [info] = pool.generators()
        assert info.state is GeneratorState.REFUSED
        assert f"{MAX_FAILURES + 1} failures in a row" in info.reason
        # No other run would help, so it is no error of the config.
        _, work = generators.begin(pool)
        wait(work)
        with pytest.raises(ServiceUnavailable, match="none is ready"):
            work.result()
        pool.wait_until_ready(SECONDS)
        assert len(generators.step(pool)) == len(PROMPTS) * SAMPLES


def test_wrong_weights_refuse_a_generator_also_after_a_reconnect(generators: Generators) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        _, work = generators.begin(pool)
        wait(work)
        work.refuse(generators.read()[0], "wrong weights")
        with pytest.raises(ServiceUnavailable, match=f"{address}: wrong weights"):
            pool.wait_until_ready(SECONDS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "bfloat16"}, "has weights in bfloat16, actor.dtype is float32"),
        ({"vocabulary_size": 7}, "has a vocabulary of 7 ids, the actor "),
    ],
    ids=["dtype", "vocabulary"],
)
def test_a_generator_of_another_model_gets_no_work(
    changes: dict[str, Any], reason: str, generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = Generator.status
    monkeypatch.setattr(Generator, "status", lambda generator: replace(status(generator), **changes))
    address = generators.start()
    with pytest.raises(ServiceUnavailable, match=f"{address}: {reason}"), generators.pool(address):
        pass


def test_a_generator_of_another_version_gets_no_work(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_check, "__version__", "99")
    address = generators.start()
    with pytest.raises(ServiceUnavailable, match="this is 99; install the same version"), generators.pool(address):
        pass


def test_a_cancelled_work_stops_its_generators_which_then_do_the_next(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with generators.pool(generators.start()) as pool:
        _, work = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        work.cancel()
        wait(work)
        with pytest.raises(Cancelled):
            work.result()
        generators.stream.reset()
        assert len(generators.step(pool, 2)) == len(PROMPTS) * SAMPLES


def test_a_further_batch_of_a_step_comes_before_those_of_later_steps(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, order = Gate(monkeypatch), list[str]()
    with generators.pool(generators.start()) as pool:
        batch, busy = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        requests = [replace(each, id=replace(each.id, sample=each.id.sample + SAMPLES)) for each in batch.requests]
        works = {"later": generators.begin(pool, 2)[1], "further": pool.start(replace(batch, requests=requests))[1]}
        for name, work in works.items():
            work.add_done_callback(lambda _, name=name: order.append(name))
        gate.opened.set()
        for work in (busy, *works.values()):
            wait(work)
    assert order == ["further", "later"]


def test_the_work_of_a_refused_generator_continues_on_another(generators: Generators) -> None:
    first, second = generators.start(), generators.start()
    with generators.pool(first, second) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        _, work = generators.begin(pool)
        wait(work)
        result = generators.read()
        for item in result:
            (work.refuse(item, "wrong weights") if item.generator == first else work.arrived(item))
        wait(work)
        assert work.result() == len(result)
        again = generators.read()
        assert {item.generator for item in again} == {second}
        assert [item.id for item in again] == [item.id for item in result if item.generator == first]
        assert generators.notes == [f"generator at {first} gets no work: wrong weights"]
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {second}


def test_a_late_trajectory_of_an_abandoned_call_refuses_no_generator(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    address = generators.start()
    with generators.pool(address) as pool:
        batch, cancelled = generators.begin(pool)
        assert gate.reached.wait(SECONDS)
        member = pool._by_address[address]
        with pool.lock:
            attempt = member.attempt
        cancelled.cancel()
        wait(cancelled)
        _, work = generators.begin(pool)
        wait(work)
        result = generators.read()
        late = replace(result[0], attempt=attempt, weights_digest=bytes(16))
        assert attempt
        assert work.abandoned(late)
        assert not any(work.abandoned(item) or work.wrong_origin(item) for item in result)
        # One that was abandoned after the check.
        work.refuse(late, "wrong weights")
        assert member.ready
        assert work.result() == len(batch.requests)
        assert contents(result) == contents(generators.by_the_actor())


def test_a_trajectory_that_names_another_origin_than_its_call_is_refused(generators: Generators) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        batch, work = generators.begin(pool)
        wait(work)
        written = generators.read()
        for changes, reason in (
            ({"generator": ""}, "names the generator none; expected the address at which it was called"),
            ({"generator": "elsewhere:1"}, "names the generator elsewhere:1"),
            ({"attempt": 0}, "names attempt 0, which this run has not started"),
            ({"attempt": 1000}, "names attempt 1000, which this run has not started"),
        ):
            # The call shows which generator it was.
            assert reason in work.wrong_origin(replace(written[0], **changes))  # type: ignore[arg-type]
        generators.stream.reset()
        generators.stream.append([replace(item, attempt=1000) for item in written])
        scorer: Any = Scorer()
        services, turns = ScoringServices(scorer, scorer, scorer, 1.0, generators.actor), Mock()
        collector = Collector(generators.stream, services, 2, turns=turns)
        try:
            with pytest.raises(QuartetError, match="names attempt 1000") as raised:
                collector.collect(batch, work, lambda scored: None)
        finally:
            collector.reset()
        assert address in str(raised.value)
        # No one continues after the turns of a generator that is refused.
        turns.forget_all.assert_called()


def test_a_refused_generator_does_all_its_work_of_the_step_again_elsewhere(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = EngineProperties("torch", False, False, "whole", "tensors", "read back")
    monkeypatch.setattr(DetachedTorchEngine, "properties", property(lambda engine: properties))
    first, second = generators.start(), generators.start()
    with generators.pool(first, second) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        _, work = generators.begin(pool)
        wait(work)
        result = generators.read()
        calls = Counter(generator for generator, _ in {(item.generator, item.attempt) for item in result})
        busiest, count = calls.most_common(1)[0]
        assert count > 1, "the work must be more than one call for one of two generators"
        wrong = [item for item in result if item.generator == busiest]
        work.refuse(wrong[0], "wrong weights")
        assert all(work.abandoned(item) for item in wrong)
        wait(work)
        assert work.result() == len(result)
        assert {item.id for item in wrong} <= {
            request.id for attempt in work.attempts.values() for request in attempt.requests
        }


def test_wrong_weights_of_every_generator_end_the_work(generators: Generators) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        _, work = generators.begin(pool)
        wait(work)
        work.refuse(generators.read()[0], "wrong weights")
        wait(work)
        with pytest.raises(QuartetError, match=f"{address}: wrong weights"):
            work.result()


def test_a_version_that_the_actor_no_longer_has_is_an_error(generators: Generators) -> None:
    with generators.pool(generators.start()) as pool:
        request = requests_of("run", 1, PROMPTS, 1)
        with pytest.raises(BufferFailed, match="policy version 3: the actor has versions 0"):
            pool.start(GenerationBatch("run", 1, 1, request, SAMPLING, 0, 3))


def test_an_engine_that_is_not_seeded_gets_its_work_by_load(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = EngineProperties("torch", False, False, "whole", "tensors", "read back")
    monkeypatch.setattr(DetachedTorchEngine, "properties", property(lambda engine: properties))
    shares: list[int] = []
    generate = DetachedTorchEngine.generate

    def recorded(engine: Any, requests: Any, *arguments: Any) -> Any:
        shares.append(len(requests))
        return generate(engine, requests, *arguments)

    monkeypatch.setattr(DetachedTorchEngine, "generate", recorded)
    addresses = [generators.start() for _ in range(2)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        result = generators.step(pool)
    assert [item.id for item in result] == [request.id for request in requests_of(generators._run, 1, PROMPTS, SAMPLES)]
    assert len(shares) > 2
    assert max(shares) < len(result) / 2


def test_a_generator_of_another_engine_gets_no_work(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = EngineProperties("vllm", True, False, "whole", "tensors", "read back")
    monkeypatch.setattr(DetachedTorchEngine, "properties", property(lambda engine: properties))
    address = generators.start()
    with (
        pytest.raises(ServiceUnavailable, match=f"{address}: runs engine vllm, rollout.engine is torch"),
        generators.pool(address),
    ):
        pass
    assert generators.notes == [
        f"generator at {address} gets no work: runs engine vllm, rollout.engine is torch; start it with this run's config"
    ]
