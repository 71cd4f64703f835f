"""Generators whose weights change during a call: what a pool does with their trajectories, and with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.contract.status import GeneratorState
from quartet.errors import WeightsChanged
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.services.generator import attestation
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from tests.services.orchestrator.rollout.generator_pools import Gate, Generators, contents, wait
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attestation, "SHARE", 1000.0)


def damage_after(monkeypatch: pytest.MonkeyPatch, generations: set[int]) -> None:
    """Change a weight at the end of these generations, counted from 1."""
    generate, count = DetachedTorchEngine.generate, list[int]()

    def damaged(engine: Any, *arguments: Any) -> Any:
        count.append(1)
        number = len(count)
        yield from generate(engine, *arguments)
        if number in generations:
            with torch.no_grad():
                next(iter(engine._weights.values())).view(-1)[0] += 1.0

    monkeypatch.setattr(DetachedTorchEngine, "generate", damaged)


def changed(pool: GeneratorPool) -> float:
    return pool.take_metrics(100)["weights_changed"]


def test_trajectories_that_have_not_arrived_are_generated_again_with_the_same_bits(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    expected = generators.by_the_actor()
    damage_after(monkeypatch, {1})
    with generators.pool(address) as pool:
        _, work = generators.begin(pool)
        wait(work)
        work.result()
        kept = [item for item in generators.read() if not work.abandoned(item)]
        assert contents(kept) == contents(expected)
        assert changed(pool) == 1
        assert changed(pool) == 0, "each is counted once"
        [note] = generators.notes
        assert note.startswith(f"generator {address}: what it generated is discarded and generated again: ")


def test_a_work_of_which_a_trajectory_has_arrived_fails_so_that_the_step_begins_again(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    damage_after(monkeypatch, {1})
    gate = Gate(monkeypatch)
    with generators.pool(address) as pool:
        _, work = generators.begin(pool)
        assert gate.reached.wait(30)
        attempt = next(iter(pool._works[0].attempts))
        arrived = pool._works[0].attempts[attempt].requests[0].id
        pool._works[0].seen.add(arrived)
        gate.opened.set()
        wait(work)
        with pytest.raises(WeightsChanged, match="have changed since version 0 was loaded"):
            work.result()
        late = [item for item in generators.read() if item.attempt == attempt]
        assert late, "FLUSH trajectories were written before the end"
        assert all(work.abandoned(item) and not work.arrived(item) for item in late)
        # The generator loads its weights again, and does the next work.
        assert len(generators.step(pool, 2)) == len(generators.by_the_actor())


def test_a_process_whose_weights_change_twice_gets_no_more_work_until_its_restart(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = generators.start()
    damage_after(monkeypatch, {1, 2})
    with generators.pool(address) as pool:
        _, work = generators.begin(pool)
        wait(work)
        with pytest.raises(Exception, match="have changed since"):
            work.result()
        assert pool.generators()[0].state is GeneratorState.REFUSED
        generators.read()
        generators.lose(address)
        generators.start(address)
        wait_until(lambda: pool.generators()[0].state is GeneratorState.READY)
        assert len(generators.step(pool, 2)) == 10
