"""In-flight updates of generators: who gets them, what a step accepts, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.root import Config
from quartet.contract.generation import GenerationBatch, SamplingParameters, requests_of
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Trajectory, VersionSpan
from quartet.engines.engine import ServedModel
from quartet.errors import BufferFailed, MismatchError, ServiceFailed, ServiceUnavailable
from quartet.rpc.clients import ActorClient, WeightClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.generator.generator import Generator
from quartet.services.generator.servicer import GeneratorServicer
from quartet.services.orchestrator.checkpointing.step_artifacts import in_flight_metrics
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector
from quartet.services.orchestrator.rollout.generator_pool import GeneratorPool
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.weight_transfer.receiver import WeightMirror
from tests.buffer.samples import forked, trajectory
from tests.services.in_flight_engine import SECONDS, InFlightEngine
from tests.services.model_services import Services
from tests.services.orchestrator.fake_services import FakeGeneration, Scorer
from tests.services.orchestrator.rollout.failing_services import batch_of, ended_generation
from tests.services.orchestrator.rollout.generator_pools import PROMPTS, wait
from tests.services.orchestrator.rollout.test_wrong_engines import train
from tests.waiting import wait_until

SAMPLING = SamplingParameters(6, ignore_eos=True)
OLD, NEW = b"of the old policy"[:16], b"of the new policy"[:16]


class Cluster:
    """An actor that publishes versions, generators with engines that pause, and a pool of them."""

    def __init__(self, config: Config, services: Services, client: Redis, url: str) -> None:
        self.config, self.run = config, config.run.name
        self._services, self._client, self._url = services, client, url
        self.hosted: Any = services.build(Role.ACTOR, config)
        self.actor: ActorClient = services.client(Role.ACTOR, services.serve(self.hosted))
        self.stream = RolloutStream(client, url, self.run)
        self.stream.reset()
        self.engines: dict[str, InFlightEngine] = {}
        self.notes: list[str] = []
        self.pool: GeneratorPool

    def start(self, engine: InFlightEngine) -> str:
        """Start a generator. Return its address."""
        served = ServedModel("m", "float32", frozenset(), 64, 0)
        generator = Generator(
            lambda: engine,
            served,
            ServiceStatus(Role.GENERATOR, dtype="float32", vocabulary_size=self.actor.status().vocabulary_size),
            lambda run: RolloutStream(self._client, self._url, run),
        )

        def peers(sources: Sequence[tuple[Role, str]]) -> list[Any]:
            return [WeightClient(role, address) for role, address in sources]

        hosted = GeneratorServicer(
            generator, ComputeThread(), 1, lambda: False, WeightMirror(), peers, updates=ComputeThread()
        )
        address = self._services.serve(hosted).address
        self.engines[address] = engine
        return address

    def open(self) -> None:
        """Connect a pool to the generators, and wait for all of them."""
        services = self.config.services.model_copy(update={"generators": tuple(self.engines)})
        self.pool = GeneratorPool(self.config.model_copy(update={"services": services}), self.actor, self.notes.append)
        self.pool.wait_until_ready(SECONDS)
        wait_until(lambda: len(self.pool.statuses()) == len(self.engines))

    @property
    def refusals(self) -> list[str]:
        """The notes about generators. The others warn that such a run does not repeat."""
        return [note for note in self.notes if note.startswith("generator ")]

    def begin(self, step: int = 2, version: int = 0) -> tuple[GenerationBatch, Any]:
        requests = requests_of(self.run, step, PROMPTS, 2)
        return self.pool.start(GenerationBatch(self.run, step, 1, requests, SAMPLING, 5, version))

    def collect(self, batch: GenerationBatch, work: Any) -> CollectedStep:
        scorer: Any = Scorer()
        collector = Collector(self.stream, ScoringServices(scorer, scorer, scorer, 1.0, self.actor), 2)
        try:
            return collector.collect(batch, work, lambda scored: None)
        finally:
            collector.reset()

    def publish(self) -> bytes:
        """Publish version 1 as an update of step 1 does; tell the pool. Return the digest."""
        train(self.hosted, self.run, seed=1)
        publication = self.actor.status().last_publication
        assert publication is not None
        self.pool.policy_updated(1, publication)
        return publication.weights_digest

    def close(self) -> None:
        for engine in self.engines.values():
            engine.resume()
        self.pool.close()


@pytest.fixture
def cluster(
    make_config: Callable[..., Config], services: Services, redis_client: Redis, redis_url: str
) -> Iterator[Cluster]:
    config = make_config(rollout={"max_off_policy_steps": 1, "generators": 1}, buffer={"url": redis_url})
    rollout = config.rollout.model_copy(update={"in_flight_updates": True})
    result = Cluster(config.model_copy(update={"rollout": rollout}), services, redis_client, redis_url)
    yield result
    result.close()


def one_engine(cluster: Cluster) -> tuple[str, InFlightEngine]:
    engine = InFlightEngine()
    address = cluster.start(engine)
    cluster.open()
    return address, engine


def test_a_generator_takes_a_new_policy_in_the_middle_of_its_responses(cluster: Cluster) -> None:
    address, engine = one_engine(cluster)
    batch, work = cluster.begin()
    assert engine.paused.wait(SECONDS)
    newer = cluster.publish()
    wait_until(lambda: engine.loads == [(0, False), (1, True)])
    engine.resume()
    step = cluster.collect(batch, work)
    assert len(step.scored) == len(batch.requests)
    made = [item.trajectory for item in step.scored]
    assert {(item.policy_version, item.weights_digest, item.generator) for item in made} == {(1, newer, address)}
    # The first share was being generated; later shares begin with the newest policy.
    in_flight = (VersionSpan(0, batch.weights_digest, 2), VersionSpan(1, newer, 4))
    assert {item.version_spans for item in made} == {in_flight, ()}
    wait_until(lambda: cluster.pool.take_metrics(1)["weight_update_seconds"] > 0)
    assert cluster.refusals == []
    assert any(note.startswith("rollout.in_flight_updates: ") for note in cluster.notes)


def test_a_generator_begins_nothing_during_an_update_in_flight(cluster: Cluster) -> None:
    address, engine = one_engine(cluster)
    batch, work = cluster.begin()
    assert engine.paused.wait(SECONDS)
    engine.may_load.clear()
    cluster.publish()
    engine.resume()
    member = cluster.pool._by_address[address]
    # The call ends after the update, because its weights are attested at its end.
    wait_until(lambda: not engine._generating and member.update is not None)
    engine.may_load.set()
    step = cluster.collect(batch, work)
    # The first share ended before the update, and the others waited for it.
    assert {item.trajectory.policy_version for item in step.scored} == {0, 1}
    assert engine.loads == [(0, False), (1, False)]


def test_what_begins_after_an_update_begins_with_the_newest_policy(cluster: Cluster) -> None:
    _, engine = one_engine(cluster)
    engine.resume()
    train(cluster.hosted, cluster.run, seed=1)
    batch, work = cluster.begin(version=0)
    assert batch.policy_version == 0
    step = cluster.collect(batch, work)
    assert {(item.trajectory.policy_version, item.trajectory.version_spans) for item in step.scored} == {(1, ())}
    assert engine.loads == [(1, False)]


def test_an_evaluation_is_by_the_policy_that_it_names(cluster: Cluster) -> None:
    _, engine = one_engine(cluster)
    batch, work = cluster.begin(step=0)
    assert engine.paused.wait(SECONDS)
    cluster.publish()
    engine.resume()
    step = cluster.collect(batch, work)
    assert {item.trajectory.policy_version for item in step.scored} == {0}
    assert engine.loads == [(0, False)]


def test_without_the_setting_a_generator_keeps_its_policy_until_the_next_step(cluster: Cluster) -> None:
    rollout = cluster.config.rollout.model_copy(update={"in_flight_updates": False})
    cluster.config = cluster.config.model_copy(update={"rollout": rollout})
    _, engine = one_engine(cluster)
    batch, work = cluster.begin()
    assert engine.paused.wait(SECONDS)
    cluster.publish()
    engine.resume()
    step = cluster.collect(batch, work)
    assert {item.trajectory.policy_version for item in step.scored} == {0}
    assert engine.loads == [(0, False)]


def test_an_engine_that_cannot_take_updates_in_flight_gets_none(cluster: Cluster) -> None:
    engine = InFlightEngine()
    engine.properties = replace(engine.properties, in_flight_updates=False)
    cluster.start(engine)
    cluster.open()
    batch, work = cluster.begin()
    assert engine.paused.wait(SECONDS)
    cluster.publish()
    engine.resume()
    assert len(cluster.collect(batch, work).scored) == len(batch.requests)
    assert engine.loads == [(0, False), (1, False)]


def test_a_generator_that_loses_an_update_in_flight_is_refused_and_the_others_do_its_work(cluster: Cluster) -> None:
    faulty, sound = InFlightEngine(), InFlightEngine()
    wrong, right = cluster.start(faulty), cluster.start(sound)
    cluster.open()
    batch, work = cluster.begin()
    assert faulty.paused.wait(SECONDS)
    assert sound.paused.wait(SECONDS)
    faulty.lost = names(cluster)
    cluster.publish()
    wait_until(lambda: cluster.refusals)
    assert cluster.refusals[0].startswith(f"generator at {wrong} gets no work: ")
    assert "after it loaded version 1" in cluster.refusals[0]
    faulty.resume()
    sound.resume()
    step = cluster.collect(batch, work)
    assert {item.trajectory.generator for item in step.scored} == {right}


def names(cluster: Cluster) -> set[str]:
    """Return the names of the policy's tensors."""
    return {name for name, _ in cluster.hosted.core._model.named_parameters()}


def test_an_update_in_flight_that_fails_ends_the_work_of_its_generator(cluster: Cluster) -> None:
    _, engine = one_engine(cluster)
    _, work = cluster.begin()
    assert engine.paused.wait(SECONDS)
    engine.failure = ServiceFailed("no memory")
    cluster.publish()
    wait(work)
    with pytest.raises(ServiceUnavailable, match="none is ready"):
        work.result()


def spans(run: str, *parts: tuple[int, bytes, int], **changes: Any) -> Trajectory:
    """Return a trajectory of 3 tokens with these parts."""
    version, digest, _ = parts[-1]
    result = trajectory(run, 1, version=version)
    versions = tuple(VersionSpan(*part) for part in parts) if len(parts) > 1 else ()
    return replace(result, **{"weights_digest": digest, "version_spans": versions, "generator": "here:1", **changes})


def collect_one(stream: RolloutStream, item: Trajectory, newer: dict[int, bytes], actor: Any = None) -> CollectedStep:
    """Collect a trajectory that version 0 of digest OLD was asked for."""
    stream.append([item])
    generation: FakeGeneration = ended_generation()
    generation.newer = newer
    scorer: Any = Scorer()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 1.0, actor), 1)
    try:
        return collector.collect(replace(batch_of([item]), weights_digest=OLD), generation, lambda scored: None)
    finally:
        collector.reset()


@pytest.mark.parametrize(
    "parts",
    [
        [(0, OLD, 3)],
        [(0, OLD, 1), (1, NEW, 2)],
        [(0, OLD, 1), (2, OLD, 2)],
        [(0, OLD, 1), (1, NEW, 1), (2, OLD, 1)],
        [(1, NEW, 3)],
        [(1, NEW, 2), (2, OLD, 1)],
    ],
)
def test_a_step_accepts_published_updates_of_the_requested_policy(
    parts: list[tuple[int, bytes, int]], stream: RolloutStream, run: str
) -> None:
    assert len(collect_one(stream, spans(run, *parts), {1: NEW, 2: OLD}).scored) == 1


def forked_spans(run: str, *parts: tuple[int, bytes, int], newest: tuple[int, bytes]) -> Trajectory:
    """Return an episode of two branches, of 3 and 2 tokens, with these parts."""
    changes: dict[str, Any] = {"policy_version": newest[0], "weights_digest": newest[1]}
    return replace(spans(run, *parts, **changes), further_branches=forked(run, 1).further_branches)


@pytest.mark.parametrize(
    "parts",
    [
        # The first branch continues after the second one has begun.
        [(0, OLD, 1), (1, NEW, 2), (0, OLD, 2)],
        [(0, OLD, 2), (1, NEW, 1), (0, OLD, 1), (1, NEW, 1)],
        [(0, OLD, 1), (1, NEW, 4)],
        [(0, OLD, 3), (1, NEW, 2)],
    ],
)
def test_versions_rise_within_each_branch(parts: list[tuple[int, bytes, int]], stream: RolloutStream, run: str) -> None:
    assert len(collect_one(stream, forked_spans(run, *parts, newest=(1, NEW)), {1: NEW}).scored) == 1


@pytest.mark.parametrize(
    ("parts", "newest"),
    [
        ([(1, NEW, 1), (0, OLD, 4)], (1, NEW)),
        ([(0, OLD, 3), (1, NEW, 1), (0, OLD, 1)], (1, NEW)),
        ([(0, OLD, 3), (1, NEW, 2)], (0, OLD)),
    ],
)
def test_versions_that_fall_within_a_branch_are_refused(
    parts: list[tuple[int, bytes, int]], newest: tuple[int, bytes], stream: RolloutStream, run: str
) -> None:
    with pytest.raises(BufferFailed, match="expected a rising order up to its own version in each branch"):
        collect_one(stream, forked_spans(run, *parts, newest=newest), {1: NEW})


@pytest.mark.parametrize(
    ("parts", "newer", "reason"),
    [
        ([(0, OLD, 1), (1, NEW, 2)], {}, "policy version 1 and digest"),
        ([(0, OLD, 1), (1, OLD, 2)], {1: NEW}, "policy version 1 and digest .* or one of its updates up to version 1"),
        ([(0, NEW, 1), (1, NEW, 2)], {1: NEW}, "policy version 0 and digest"),
        ([(0, OLD, 1), (2, NEW, 2)], {1: NEW}, "policy version 2 and digest"),
        ([(0, OLD, 1), (2, OLD, 1), (1, NEW, 1)], {1: NEW, 2: OLD}, r"policy versions \[0, 2, 1\] in this order"),
        ([(0, OLD, 1), (0, OLD, 2)], {1: NEW}, r"policy versions \[0, 0\] in this order"),
        ([(2, NEW, 3)], {1: NEW}, "policy version 2 and digest"),
    ],
)
def test_other_parts_are_refused_by_name(
    parts: list[tuple[int, bytes, int]], newer: dict[int, bytes], reason: str, stream: RolloutStream, run: str
) -> None:
    with pytest.raises(BufferFailed, match=f"generator here:1: .*/1/1/0 is of {reason}"):
        collect_one(stream, spans(run, *parts), newer)


def test_the_last_part_is_that_of_the_trajectory(stream: RolloutStream, run: str) -> None:
    item = spans(run, (0, OLD, 1), (1, NEW, 2), policy_version=0, weights_digest=OLD)
    with pytest.raises(BufferFailed, match=r"policy versions \[0, 1\] in this order"):
        collect_one(stream, item, {1: NEW})


class Comparing:
    """An actor that records which trajectories are compared with its log-probs, and refuses all."""

    def versioned_log_probs(self, *_: Any) -> Future[Any]:
        raise MismatchError("compared")


@pytest.mark.parametrize(
    ("parts", "compared"), [([(0, OLD, 3)], True), ([(0, OLD, 1), (1, NEW, 2)], False), ([(1, NEW, 3)], False)]
)
def test_only_trajectories_of_the_requested_policy_are_compared(
    parts: list[tuple[int, bytes, int]], compared: bool, stream: RolloutStream, run: str
) -> None:
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(collect_one, stream, spans(run, *parts), {1: NEW}, Comparing())
        error = result.exception(SECONDS)
    assert isinstance(error, MismatchError) is compared


def test_metrics_weigh_each_version_by_its_tokens(run: str) -> None:
    items = [spans(run, (4, OLD, 1), (6, NEW, 2)), spans(run, (4, OLD, 3)), spans(run, (5, NEW, 3))]
    assert in_flight_metrics(7, 4, items) == {"off_policy_steps": (2 * 4 + 1 * 3) / 9, "in_flight_tokens": 5 / 9}
