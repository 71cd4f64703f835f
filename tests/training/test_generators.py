"""Runs with generators: their number, their loss and their replacement change no bit. Every trajectory is trained on once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.config import Config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.services.generator.factory import build_generator
from quartet.services.orchestrator.step import StepTransaction
from quartet.types import Role
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, orchestrator, run_to_completion
from tests.training.test_recovery import run_with_lost_service

STEPS = 4
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": 3},
    "rollout": {"samples_per_prompt": 2},
    "recovery": {"backoff_seconds": 0.01},
}


class Generators:
    """Generator servers at fixed addresses. Each can be lost, and come back with the initial weights."""

    def __init__(self, config: Config, count: int) -> None:
        self._config = config
        self._servers: dict[str, Server] = {}
        self.addresses = tuple(self.start() for _ in range(count))

    def start(self, address: str = "127.0.0.1:0") -> str:
        """Start a generator. Return its address."""
        server = Server([build_generator(self._config, ComputeThread(), 1, LOCAL)], address)
        self._servers[server.address] = server
        return server.address

    def lose(self, address: str) -> None:
        """Stop a generator without waiting for its calls."""
        self._servers.pop(address).stop(0.0)

    def stop(self) -> None:
        """Stop all generators."""
        for server in self._servers.values():
            server.stop(0.0)


@contextmanager
def generators(config: Config, count: int) -> Iterator[tuple[Generators, Config]]:
    """Run generators; yield them and the config with their addresses."""
    running = Generators(
        config.model_copy(update={"rollout": config.rollout.model_copy(update={"generators": 1})}), count
    )
    services = config.services.model_copy(update={"generators": running.addresses})
    try:
        yield running, config.model_copy(update={"services": services})
    finally:
        running.stop()


def run_with_generators(
    config: Config, count: int, at_step: Callable[[Generators, int], None] = lambda generators, step: None
) -> Run:
    """Run the training with generators. ``at_step`` is called when a step has started."""
    with generators(config, count) as (running, with_generators), pytest.MonkeyPatch.context() as patch:
        prepare = StepTransaction._prepare

        def prepared(transaction: Any, step: int, *arguments: Any) -> Any:
            at_step(running, step)
            return prepare(transaction, step, *arguments)

        patch.setattr(StepTransaction, "_prepare", prepared)
        with fleet(with_generators) as services, orchestrator(services.config) as active:
            return active.finish()


@pytest.fixture(scope="module")
def built_in(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_generators_give_the_same_bits_as_the_engine_of_the_actor(count: int, make: MakeConfig, built_in: Run) -> None:
    run = run_with_generators(make(**SHORT), count)
    assert_same(run, built_in)
    assert run.progress.recoveries == 0


def test_generators_that_are_lost_and_replaced_change_nothing(make: MakeConfig, built_in: Run) -> None:
    threads: list[threading.Thread] = []

    def replace_one(running: Generators, step: int) -> None:
        # The generation of this step has started already. The other generator does the work of the lost one.
        for thread in threads:
            thread.join(20)
        lost = running.addresses[step % 2]
        running.lose(lost)
        threads.append(threading.Thread(target=running.start, args=[lost]))
        threads[-1].start()

    run = run_with_generators(make(**SHORT), 2, replace_one)
    for thread in threads:
        thread.join(20)
    assert_same(run, built_in)
    ids = Counter(line["id"] for step in range(1, STEPS + 1) for line in run.trajectories(step))
    assert set(ids.values()) == {1}
    assert len(ids) == STEPS * 4 * 2


def test_a_run_recovers_when_all_generators_are_lost(make: MakeConfig, built_in: Run) -> None:
    timers: list[threading.Timer] = []

    def lose_all(running: Generators, step: int) -> None:
        if step == 3 and not timers:
            for address in running.addresses:
                running.lose(address)
                timers.append(threading.Timer(0.3, running.start, [address]))
                timers[-1].start()

    run = run_with_generators(make(**SHORT), 2, lose_all)
    for timer in timers:
        timer.join(20)
    assert_same(run, built_in)


OFF_POLICY = {
    "run": {"steps": 7},
    "checkpoint": {"every_steps": 6},
    "recovery": {"backoff_seconds": 0.01},
}


@pytest.fixture(scope="module", params=[2, 4])
def off_policy(request: pytest.FixtureRequest, make: MakeConfig) -> tuple[Callable[[], Config], Run]:
    """A factory of configs with generation k steps ahead, and an uninterrupted run."""

    def config() -> Config:
        return make(**OFF_POLICY, rollout={"max_off_policy_steps": request.param})

    run = run_to_completion(config())
    lags = [line["off_policy_steps"] for line in run.metrics]
    assert lags == [*range(request.param), *[request.param] * (6 - request.param), 0]
    return config, run


def test_a_run_k_steps_off_policy_repeats_bit_identically(off_policy: tuple[Callable[[], Config], Run]) -> None:
    config, run = off_policy
    assert_same(run_to_completion(config()), run)


@pytest.mark.parametrize("moment", ["generate", "update", "commit"])
def test_a_run_k_steps_off_policy_survives_the_loss_of_the_actor(
    moment: str, off_policy: tuple[Callable[[], Config], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = off_policy
    assert_same(run_with_lost_service(config(), moment, Role.ACTOR, monkeypatch), run)


def test_generators_k_steps_off_policy_give_the_same_bits(off_policy: tuple[Callable[[], Config], Run]) -> None:
    config, run = off_policy
    assert_same(run_with_generators(config(), 2), run)
