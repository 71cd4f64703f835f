"""Generators that get no more work: until when, and how often the user is told."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from quartet.errors import ServiceFailed
from quartet.services.generator.generator import Generator
from quartet.services.orchestrator.rollout import generator_members
from quartet.services.orchestrator.rollout.generator_members import Member
from quartet.services.orchestrator.rollout.generator_pool import MAX_FAILURES, GeneratorPool
from quartet.types import GeneratorState
from tests.services.orchestrator.rollout.test_generator_pool import SECONDS, Generators, prompts_by_generator, until
from tests.services.orchestrator.rollout.test_generator_pool import generators as generators


@pytest.fixture(autouse=True)
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_members, "CHECK_SECONDS", 0.01)


def asked_again(pool: GeneratorPool, member: Member) -> None:
    """Wait until a generator has given its status twice more."""
    for _ in range(2):
        before = member.question
        until(lambda before=before: member.question is not before)
        question, answered = member.question, threading.Event()
        assert question is not None
        question.when_done(answered.set)
        assert answered.wait(SECONDS)
    with pool._lock:
        pass  # The answer is handled.


def fail_loads(monkeypatch: pytest.MonkeyPatch, count: int = 10**6) -> list[int]:
    """Let the first ``count`` loads of weights fail, as with too little memory. Return a list that gets one entry per load."""
    load, loads = Generator._load, list[int]()

    def failing(generator: Generator, *arguments: Any) -> Any:
        loads.append(len(loads))
        if len(loads) <= count:
            generator._held = None
            raise ServiceFailed("no memory")
        return load(generator, *arguments)

    monkeypatch.setattr(Generator, "_load", failing)
    return loads


def test_a_refused_generator_without_weights_gets_no_work_until_it_is_restarted(generators: Generators) -> None:
    first, second = generators.start(), generators.start()
    with generators.pool(first, second) as pool:
        until(lambda: len(pool.statuses()) == 2)
        member = pool._members.by_address[second]
        # As after a failed load: it holds nothing, as if it had just started.
        with pool._lock:
            pool._members.refuse(member, "has dropped the update")
        asked_again(pool, member)
        assert not member.ready
        assert prompts_by_generator(generators.step(pool)).keys() == {first}
        generators.lose(second)
        generators.start(second)
        until(lambda: member.ready)
        assert prompts_by_generator(generators.step(pool, 2)).keys() == {first, second}
        assert generators.notes == [f"generator {second} gets no more work: has dropped the update"]


def test_a_generator_whose_loads_fail_is_refused_after_a_limited_number(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    with generators.pool(address) as pool:
        loads, member = fail_loads(monkeypatch), pool._members.by_address[address]
        for step in range(1, MAX_FAILURES + 2):
            until(lambda: member.ready)
            generators.begin(pool, step)
            until(lambda step=step: member.failures == step)
        asked_again(pool, member)
        generators.begin(pool, 9)
        assert len(loads) == MAX_FAILURES + 1
        assert pool.generators()[0].state is GeneratorState.REFUSED
        assert len(generators.notes) == 1


def test_a_generator_that_does_not_fit_is_noted_once(generators: Generators, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = generators.start(), generators.start()
    generators.lose(second)
    with generators.pool(first, second) as pool, monkeypatch.context() as patched:
        status, member = Generator.status, pool._members.by_address[second]
        patched.setattr(Generator, "status", lambda generator: replace(status(generator), dtype="bfloat16"))
        generators.start(second)
        until(lambda: member.refused)
        asked_again(pool, member)
        assert generators.notes == [f"generator {second} gets no work: {member.refused}"]
        patched.undo()
        generators.lose(second)
        generators.start(second)
        until(lambda: member.ready)
        assert len(generators.notes) == 1
