"""Training runs with generators, each behind a separate server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quartet.config.root import Config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.services.generator.factory import build_generator
from quartet.services.orchestrator.step import StepTransaction
from tests.training.runs import ActiveRun, Run, fleet, orchestrator, wait_for
from tests.waiting import LIMIT


class Generators:
    """Generator servers at fixed addresses. Each can be lost, and come back with the initial weights."""

    def __init__(self, config: Config, count: int) -> None:
        self._config = config
        self._servers: dict[str, Server] = {}
        self._restarts: list[threading.Thread] = []
        self.addresses = tuple(self.start() for _ in range(count))

    def start(self, address: str = "127.0.0.1:0") -> str:
        """Start a generator. Return its address."""
        server = Server([build_generator(self._config, ComputeThread(), 1, LOCAL)], address)
        self._servers[server.address] = server
        return server.address

    def lose(self, address: str) -> None:
        """Stop a generator without waiting for its calls."""
        self._servers.pop(address).stop(0.0)

    def replace(self, address: str) -> None:
        """Stop a generator as ``lose`` does, and start it again on another thread."""
        self.finish_restarts()
        self.lose(address)
        self._restarts.append(threading.Thread(target=self.start, args=[address]))
        self._restarts[-1].start()

    def finish_restarts(self) -> None:
        """Wait until all replaced generators are back."""
        for thread in self._restarts:
            thread.join(LIMIT)

    def stop(self) -> None:
        """Stop all generators."""
        self.finish_restarts()
        for server in self._servers.values():
            server.stop(0.0)


@contextmanager
def active_run_with_generators(config: Config, count: int) -> Iterator[tuple[ActiveRun, Generators]]:
    """Run the services, ``count`` generators and the training of a config."""
    rollout = config.rollout.model_copy(update={"generators": 1})
    running = Generators(config.model_copy(update={"rollout": rollout}), count)
    named = config.services.model_copy(update={"generators": running.addresses})
    try:
        with fleet(config.model_copy(update={"services": named})) as services, orchestrator(services.config) as active:
            yield active, running
    finally:
        running.stop()


@contextmanager
def generator_run(config: Config, count: int, steps: int) -> Iterator[tuple[ActiveRun, Generators]]:
    """Start a run with generators and pause it after ``steps`` steps. The services stay up."""
    with active_run_with_generators(config, count) as (active, running):
        wait_for(active, lambda: active.board.current().step >= steps)
        active.control.pause()
        wait_for(active, lambda: active.board.current().phase == "paused")
        yield active, running


def run_with_generators(
    config: Config, count: int, at_step: Callable[[Generators, int], None] = lambda generators, step: None
) -> Run:
    """Run the training with generators. ``at_step`` is called when a step has started."""
    prepare, ready, running = StepTransaction._prepare, threading.Event(), list[Generators]()

    def prepared(transaction: Any, step: int, *arguments: Any) -> Any:
        assert ready.wait(LIMIT)
        at_step(running[0], step)
        return prepare(transaction, step, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTransaction, "_prepare", prepared)
        with active_run_with_generators(config, count) as (active, generators):
            running.append(generators)
            ready.set()
            return active.finish()
