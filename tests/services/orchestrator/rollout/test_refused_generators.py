"""Generators that fail or are refused: until when they get no work, and how often the user is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quartet.codec.generation import WeightUpdate
from quartet.contract.status import GeneratorState, Role
from quartet.errors import ServiceFailed, ServiceUnavailable, StaleLeaderEpoch
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.rpc import replica_set
from quartet.services.generator.generator import Generator
from quartet.services.orchestrator.rollout.generator_pool import MAX_FAILURES, GeneratorPool
from quartet.services.orchestrator.rollout.generator_work import RemoteGenerator
from tests.services.orchestrator.rollout.generator_pools import (
    SECONDS,
    Generators,
    contents,
    prompts_by_generator,
    wait,
)
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_set, "CHECK_SECONDS", 0.01)


def asked_again(pool: GeneratorPool, member: RemoteGenerator) -> None:
    """Wait until the pool has handled another status of a generator."""
    questions = {member.question}

    def asked() -> int:
        questions.add(member.question)
        return len(questions) - 1

    wait_until(lambda: asked() > 2)
    with pool.lock:
        pass  # The answer is handled.


def test_a_refused_generator_without_weights_gets_no_work_until_it_is_restarted(generators: Generators) -> None:
    first, second = generators.start(), generators.start()
    with generators.pool(first, second) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        member = pool._by_address[second]
        # As after a failed load: it holds nothing, as if it had just started.
        with pool.lock:
            pool._refuse(member, "has dropped the update")
        asked_again(pool, member)
        assert not member.ready
        assert prompts_by_generator(generators.step(pool)).keys() == {first}
        generators.lose(second)
        generators.start(second)
        wait_until(lambda: member.ready)
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {first, second}
        assert generators.notes == [f"generator at {second} gets no work: has dropped the update"]


def test_a_generator_whose_loads_fail_is_refused_after_a_limited_number(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        loads, member = list[int](), pool._by_address[address]

        def failing(*_: Any) -> Any:
            loads.append(1)
            raise ServiceFailed("no memory")

        monkeypatch.setattr(DetachedTorchEngine, "load_weights", failing)
        for step in range(1, MAX_FAILURES + 2):
            wait_until(lambda: member.ready)
            _, work = generators.begin(pool, step)
            wait(work)
        asked_again(pool, member)
        _, work = generators.begin(pool, 9)
        wait(work)
        assert len(loads) == MAX_FAILURES + 1
        assert pool.generators()[0].state is GeneratorState.REFUSED
        assert len(generators.notes) == 1


def test_a_generator_that_does_not_fit_is_noted_once(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = generators.start(), generators.start()
    generators.lose(second)
    with generators.pool(first, second) as pool, monkeypatch.context() as patched:
        status, member = Generator.status, pool._by_address[second]
        patched.setattr(Generator, "status", lambda generator: replace(status(generator), dtype="bfloat16"))
        generators.start(second)
        wait_until(lambda: member.refused)
        asked_again(pool, member)
        assert generators.notes == [f"generator at {second} gets no work: {member.refused}"]
        patched.undo()
        generators.lose(second)
        generators.start(second)
        wait_until(lambda: member.ready)
        assert len(generators.notes) == 1


def test_a_generator_whose_engine_has_lost_its_weights_gets_them_again(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, lost = generators.start(), False
    load, generate = DetachedTorchEngine.load_weights, DetachedTorchEngine.generate

    def loading(*arguments: Any) -> Any:
        nonlocal lost
        lost = False
        return load(*arguments)

    def generating(*arguments: Any) -> Any:
        if lost:
            raise ServiceFailed("the server was restarted")
        return generate(*arguments)

    monkeypatch.setattr(DetachedTorchEngine, "load_weights", loading)
    monkeypatch.setattr(DetachedTorchEngine, "generate", generating)
    with generators.pool(address) as pool:
        before = generators.step(pool)
        generators.stream.reset()
        lost = True
        _, work = generators.begin(pool)
        wait(work)
        with pytest.raises(ServiceUnavailable, match="the server was restarted"):
            work.result()
        pool.wait_until_ready(SECONDS)
        assert contents(generators.step(pool)) == contents(before)


def test_a_superseded_orchestrator_ends_its_work_at_once_with_the_epoch_of_the_other(generators: Generators) -> None:
    addresses = [generators.start() for _ in range(2)]
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == 2)
        generators.step(pool)
        for member in pool._all():
            actor = ((Role.ACTOR, generators.actor.channel.address),)
            member.client.update_weights(WeightUpdate(generators._run, 5, 0, member.digest, actor)).result()
        _, work = generators.begin(pool, 2)
        wait(work)
        with pytest.raises(StaleLeaderEpoch, match="leader_epoch 1: an orchestrator of epoch 5 has taken over"):
            work.result()
        # Its next term needs a higher epoch.
        wait_until(lambda: max(pool.leader_epochs(), default=0) == 5)
        assert not any(info.reason for info in pool.generators())
        assert not generators.notes
