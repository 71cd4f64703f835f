"""Generators that only evaluate: which work each generator of a pool gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quartet.config.evaluation import EvaluationConfig
from quartet.contract.generation import GenerationBatch, requests_of
from quartet.contract.weights import PublishedWeights
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.services.orchestrator.rollout.generation import PendingTrajectories
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
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


@contextmanager
def pool_of(generators: Generators, count: int, reserved: int = 1) -> Iterator[tuple[GeneratorPool, list[str]]]:
    """Start generators. Return a pool that keeps ``reserved`` of them for evaluations, and the addresses in its order."""
    addresses = [generators.start() for _ in range(count)]
    evaluation = EvaluationConfig(every_steps=1, generators=reserved)
    generators.config = generators.config.model_copy(update={"evaluation": evaluation})
    with generators.pool(*addresses) as pool:
        wait_until(lambda: len(pool.statuses()) == count)
        yield pool, addresses


def evaluate(generators: Generators, pool: GeneratorPool, beside_training: bool = True) -> PendingTrajectories:
    """Start an evaluation with policy version 0."""
    requests = requests_of(generators._run, 0, PROMPTS, SAMPLES)
    return pool.start(GenerationBatch(generators._run, 0, 1, requests, SAMPLING, 5, 0), beside_training)[1]


@pytest.mark.parametrize("reserved", [1, 2])
def test_steps_and_evaluations_have_generators_of_their_own(generators: Generators, reserved: int) -> None:
    with pool_of(generators, 3, reserved) as (pool, addresses):
        works = [evaluate(generators, pool), generators.begin(pool)[1]]
        for work in works:
            wait(work)
        result = generators.read()
    of_evaluation = [item for item in result if item.id.step == 0]
    of_step = [item for item in result if item.id.step == 1]
    assert {item.generator for item in of_evaluation} == {*addresses[3 - reserved :]}
    assert {item.generator for item in of_step} == {*addresses[: 3 - reserved]}
    assert contents(of_step) == contents(generators.by_the_actor())
    assert len(of_evaluation) == len(of_step)


def test_all_generators_do_an_evaluation_for_which_training_stops(generators: Generators) -> None:
    with pool_of(generators, 3) as (pool, addresses):
        wait(evaluate(generators, pool, beside_training=False))
        assert prompts_by_generator(generators.read()).keys() == {*addresses}


def test_another_generator_takes_the_place_of_a_lost_one(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with pool_of(generators, 3) as (pool, addresses):
        work = evaluate(generators, pool)
        assert gate.reached.wait(SECONDS)
        generators.lose(addresses[2])
        wait(work)
        assert work.result() == len(PROMPTS) * SAMPLES
        assert {item.generator for item in generators.read()} <= {*addresses[1:]}
        assert prompts_by_generator(generators.step(pool)).keys() == {addresses[0]}


def test_the_only_generator_does_a_step_before_an_evaluation(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, gate = [], Gate(monkeypatch)
    with pool_of(generators, 1) as (pool, _):
        first = generators.begin(pool, 1)[1]
        assert gate.reached.wait(SECONDS)
        works = {"evaluation": evaluate(generators, pool), "step": generators.begin(pool, 2)[1]}
        for name, work in works.items():
            work.add_done_callback(lambda _, name=name: order.append(name))
        gate.opened.set()
        for work in (first, *works.values()):
            wait(work)
    assert order == ["step", "evaluation"]


def test_a_generator_for_evaluations_gets_no_weights_of_other_versions(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    real = DetachedTorchEngine.load_weights

    def load(engine: DetachedTorchEngine, *arguments: object) -> object:
        loads.append(engine)
        return real(engine, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DetachedTorchEngine, "load_weights", load)
    with pool_of(generators, 2) as (pool, addresses):
        pool.policy_updated(1, _publication(generators))
        wait_until(lambda: pool._by_address[addresses[0]].digest != b"")
        assert pool._by_address[addresses[1]].update is None
    assert len(loads) == 1


def _publication(generators: Generators) -> PublishedWeights:
    ((version, digest),) = generators.actor.status().published_weights.items()
    return PublishedWeights(version, digest, 1, 1, 0.0)
