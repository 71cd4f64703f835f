"""Pools of generators with real servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import GenerationBatch, SamplingParameters, requests_of
from quartet.contract.status import Role
from quartet.contract.trajectory import Prompt, Trajectory, TrajectoryId
from quartet.errors import Cancelled
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.rpc.clients import ActorClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.services.generator.factory import build_generator
from quartet.services.orchestrator.rollout.generation import PendingTrajectories
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.roles import build_model_role
from tests.services.model_services import start_generation
from tests.waiting import LIMIT

PROMPTS = [Prompt(index, np.arange(3, 5 + index, dtype=np.int32)) for index in range(5)]
SAMPLES = 2
SAMPLING = SamplingParameters(8, ignore_eos=True)
SECONDS = LIMIT


class Generators:
    """Generators at fixed addresses, an actor with the weights, and a pool."""

    def __init__(self, config: Config, actor: ActorClient, stream: RolloutStream) -> None:
        self.config, self.actor, self.stream = config, actor, stream
        self.servers: dict[str, Server] = {}
        self.notes: list[str] = []
        self._run = stream.key.split(":")[1]

    def start(self, address: str = "127.0.0.1:0") -> str:
        """Start a generator. Return its address."""
        server = Server([build_generator(self.config, ComputeThread(), 1, LOCAL)], address)
        self.servers[server.address] = server
        return server.address

    def lose(self, address: str) -> None:
        """Stop a generator without waiting for its calls."""
        self.servers.pop(address).stop(0.0)

    @contextmanager
    def pool(self, *addresses: str) -> Iterator[GeneratorPool]:
        """Return a pool of the generators at these addresses, which need not run yet."""
        services = self.config.services.model_copy(update={"generators": addresses})
        result = GeneratorPool(self.config.model_copy(update={"services": services}), self.actor, self.notes.append)
        try:
            result.wait_until_ready(SECONDS)
            yield result
        finally:
            result.close()

    def begin(self, pool: GeneratorPool, step: int = 1) -> tuple[GenerationBatch, PendingTrajectories]:
        """Start a step with policy version 0."""
        requests = requests_of(self._run, step, PROMPTS, SAMPLES)
        return pool.start(GenerationBatch(self._run, step, 1, requests, SAMPLING, 5, 0))

    def step(self, pool: GeneratorPool, step: int = 1) -> list[Trajectory]:
        """Generate a step, and return its trajectories by id."""
        _, work = self.begin(pool, step)
        wait(work)
        work.result()
        return self.read()

    def read(self) -> list[Trajectory]:
        """Return what is in the stream, by id."""
        return sorted((item.trajectory for item in self.stream.read(1000, 0.01)), key=lambda item: item.id)

    def by_the_actor(self) -> list[Trajectory]:
        """Return the trajectories of step 1 as an actor without generators generates them."""
        rollout = self.config.rollout.model_copy(update={"generators": 0})
        config = self.config.model_copy(update={"rollout": rollout})
        server = Server([build_model_role(Role.ACTOR, config, ComputeThread(), 1)], "127.0.0.1:0")
        actor = ActorClient(server.address, self.actor.timeouts)
        try:
            start_generation(actor, self._run, PROMPTS, SAMPLING, SAMPLES, seed=5).result()
        finally:
            actor.close()
            server.stop(0.0)
        return self.read()

    def stop(self) -> None:
        """Stop all generators."""
        for server in self.servers.values():
            server.stop(0.0)


def wait(work: PendingTrajectories) -> None:
    """Wait until a work ends, and no longer than a test may take."""
    ended = threading.Event()
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(SECONDS)


def contents(trajectories: list[Trajectory]) -> list[tuple[TrajectoryId, list[int], bytes]]:
    """Return what does not depend on the generator."""
    return [(item.id, item.response_ids.tolist(), item.log_probs.tobytes()) for item in trajectories]


def prompts_by_generator(trajectories: list[Trajectory]) -> dict[str, list[int]]:
    result: dict[str, set[int]] = {}
    for item in trajectories:
        result.setdefault(item.generator, set()).add(item.id.prompt)
    return {address: sorted(prompts) for address, prompts in result.items()}


class Gate:
    """A pause of engines after their first response, for the first ``count`` generations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._remaining, self._lock = count, threading.Lock()
        generate = DetachedTorchEngine.generate

        def gated(engine: Any, requests: Any, sampling: Any, seed: int, cancelled: Any) -> Any:
            with self._lock:
                waits = self._remaining > 0
                self._remaining -= 1
            for response in generate(engine, requests, sampling, seed, cancelled):
                yield response
                if waits:
                    self.reached.set()
                    while not self.opened.wait(0.01):
                        if cancelled():
                            raise Cancelled("generate: cancelled")

        monkeypatch.setattr(DetachedTorchEngine, "generate", gated)
