"""Engines with wrong weights are refused at their first trajectory, by name: 25 injected cases of each of four faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import GenerationBatch, GenerationRequest, SamplingParameters, requests_of
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Prompt, Trajectory
from quartet.engines.engine import Cancelled, EngineResponse
from quartet.errors import MismatchError
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.rpc.clients import WeightClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.actor.servicer import ActorServicer
from quartet.services.generator.generator import Generator
from quartet.services.generator.servicer import GeneratorServicer
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.tensors import WeightSet
from tests.services.model_services import TIMEOUTS, Services
from tests.services.orchestrator.fake_services import Scorer
from tests.waiting import LIMIT, wait_until

CASES = 25
PROMPTS = [Prompt(index, np.array([5, 6, 7 + index], np.int32)) for index in range(4)]
SAMPLING = SamplingParameters(6, ignore_eos=True)


class FaultyEngine(DetachedTorchEngine):
    """A torch engine that can lose updates, or parts of them, or use what it has computed with former weights."""

    def __init__(self, fault: str, seed: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.fault, self._random = "", random.Random(seed)
        self._injected = fault
        self._former: DetachedTorchEngine | None = None

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        names = sorted(changed)
        if self.fault == "dropped update":
            names = []
        elif self.fault == "half an update":
            names = self._random.sample(names, self._random.randrange(1, len(names)))
        elif self.fault == "stale prefix cache":
            # Locks cannot be copied.
            self._former = deepcopy(self, {id(each): each for each in (self._stepping, self._may_step)})
            # It believes to have the new weights, so it names no others.
            self._former._changes = []
        result = super().load_weights(weights, names)
        self.fault = self._injected
        return result

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Cancelled
    ) -> Iterator[EngineResponse]:
        # The prompts are those of the step before, so the cache has all of them.
        if self._former is not None:
            return DetachedTorchEngine.generate(self._former, requests, sampling, seed, cancelled)
        return super().generate(requests, sampling, seed, cancelled)


class MislabelingGenerator(Generator):
    """A generator whose trajectories name another version, or other weights, from the second version on."""

    def generate(self, batch: GenerationBatch, *arguments: Any) -> tuple[int, int]:
        if batch.policy_version:
            append = self._stream

            class Wrong(RolloutStream):
                def append(self, trajectories: Any, leader_epoch: int = 0) -> None:
                    super().append([wrong(item) for item in trajectories], leader_epoch)

            def wrong(item: Trajectory) -> Trajectory:
                if batch.seed % 2:
                    return replace(item, policy_version=batch.policy_version - 1)
                return replace(item, weights_digest=bytes(reversed(item.weights_digest)))

            def stream(run: str) -> RolloutStream:
                real = append(run)
                return Wrong(real._client, real._url, run)

            self._stream = stream
        return super().generate(batch, *arguments)


@pytest.fixture
def config(make_config: Callable[..., Config], redis_url: str) -> Config:
    rollout = {"max_concurrent_sequences": 4, "generators": 1}
    return make_config(rollout=rollout, buffer={"url": redis_url})


@pytest.mark.parametrize("fault", ["dropped update", "half an update", "stale prefix cache", "another version"])
@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.slow) for case in range(1, CASES))])
def test_an_engine_with_wrong_weights_is_refused_by_name_at_its_first_trajectory(
    fault: str, case: int, config: Config, services: Services, redis_client: Redis, redis_url: str
) -> None:
    hosted: Any = services.build(Role.ACTOR, config)
    actor = services.client(Role.ACTOR, services.serve(hosted))
    address = start_generator(fault, case, hosted, config, services, redis_client, redis_url)
    named = config.model_copy(update={"services": config.services.model_copy(update={"generators": (address,)})})
    notes: list[str] = []
    pool = GeneratorPool(named, actor, notes.append)
    stream = RolloutStream(redis_client, redis_url, config.run.name)
    scorer: Any = Scorer()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 1.0, actor), 2)
    try:
        pool.wait_until_ready(LIMIT)
        collect(pool, collector, stream, config, 1, 0, case)
        train(hosted, config.run.name, case)
        with pytest.raises(MismatchError, match=rf"{address}"):
            collect(pool, collector, stream, config, 2, 1, case)
        assert any(note.startswith(f"generator at {address} gets no work: ") for note in notes)
    finally:
        collector.reset()
        pool.close()


def test_what_a_refused_generator_has_done_for_a_later_step_is_generated_again(
    config: Config, services: Services, redis_client: Redis, redis_url: str
) -> None:
    hosted: Any = services.build(Role.ACTOR, config)
    actor = services.client(Role.ACTOR, services.serve(hosted))
    right, wrong = (
        start_generator(fault, 0, hosted, config, services, redis_client, redis_url)
        for fault in ("", "stale prefix cache")
    )
    named = config.model_copy(update={"services": config.services.model_copy(update={"generators": (right, wrong)})})
    notes: list[str] = []
    pool = GeneratorPool(named, actor, notes.append)
    stream = RolloutStream(redis_client, redis_url, config.run.name)
    scorer: Any = Scorer()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 1.0, actor), 2)
    try:
        pool.wait_until_ready(LIMIT)
        wait_until(lambda: len(pool.statuses()) == 2)
        collect(pool, collector, stream, config, 1, 0, 0)
        train(hosted, config.run.name, 0)
        collector.reset()
        stream.reset(1)
        # With max_off_policy_steps: two steps by one version.
        started = [
            pool.start(
                GenerationBatch(
                    config.run.name, step, 1, requests_of(config.run.name, step, PROMPTS, 2), SAMPLING, 0, 1
                )
            )
            for step in (2, 3)
        ]
        for _, generation in started:
            generation.result()
        collected = collector.collect(*started[0], lambda scored: None)
        # The trainer has no more log-probs of this version, so only the former refusal can tell.
        train(hosted, config.run.name, 1, step=2)
        later = collector.collect(*started[1], lambda scored: None)
        for step in (collected, later):
            assert {item.trajectory.generator for item in step.scored} == {right}
            assert len(step.scored) == 2 * len(PROMPTS)
        assert len(notes) == 1
        assert notes[0].startswith(f"generator at {wrong} gets no work: ")
    finally:
        collector.reset()
        pool.close()


def start_generator(
    fault: str, case: int, actor: ActorServicer, config: Config, services: Services, client: Redis, url: str
) -> str:
    """Start a generator with this fault; return its address."""
    served = actor.core.served_model()
    model, adapter = deepcopy((actor.core._model, actor.core._adapter))
    kind = MislabelingGenerator if fault == "another version" else Generator
    engine = FaultyEngine(fault, case, model, adapter, served.stop_ids, 4)
    status = ServiceStatus(Role.GENERATOR, dtype="float32", vocabulary_size=served.vocabulary_size)
    generator = kind(lambda: engine, served, status, lambda run: RolloutStream(client, url, run))

    def peers(sources: Sequence[tuple[Role, str]]) -> list[Any]:
        return [WeightClient(role, address) for role, address in sources]

    hosted = GeneratorServicer(generator, ComputeThread(), 1, lambda: False, WeightMirror(), peers)
    return services.serve(hosted).address


def collect(
    pool: GeneratorPool, collector: Collector, stream: RolloutStream, config: Config, step: int, version: int, seed: int
) -> None:
    """Generate and collect one step with a policy version."""
    collector.reset()
    stream.reset(1)
    requests = requests_of(config.run.name, step, PROMPTS, 2)
    batch, generation = pool.start(GenerationBatch(config.run.name, step, 1, requests, SAMPLING, seed, version))
    assert len(collector.collect(batch, generation, lambda scored: None).scored) == len(requests)


def train(actor: ActorServicer, run: str, seed: int, step: int = 1) -> None:
    """Change the policy as the update of a step does."""
    generator = torch.Generator().manual_seed(seed)
    core = actor.core
    with torch.no_grad():
        for parameter in core._model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    core._updates.record(run, step, {})
    core._publish()


def test_a_right_engine_is_not_refused(config: Config, services: Services, redis_client: Redis, redis_url: str) -> None:
    hosted: Any = services.build(Role.ACTOR, config)
    actor = services.client(Role.ACTOR, services.serve(hosted))
    address = start_generator("", 0, hosted, config, services, redis_client, redis_url)
    named = config.model_copy(update={"services": config.services.model_copy(update={"generators": (address,)})})
    pool = GeneratorPool(named, actor, lambda note: pytest.fail(note))
    stream = RolloutStream(redis_client, redis_url, config.run.name)
    scorer: Any = Scorer()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 1.0, actor), 2)
    try:
        pool.wait_until_ready(LIMIT)
        collect(pool, collector, stream, config, 1, 0, 0)
        train(hosted, config.run.name, 0)
        collect(pool, collector, stream, config, 2, 1, 0)
        assert actor.timeouts == TIMEOUTS
    finally:
        collector.reset()
        pool.close()
