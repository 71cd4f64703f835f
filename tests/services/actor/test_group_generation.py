"""Generation by several ranks at once: the same trajectories as by one, cancellation, and ranks that fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from quartet.buffer.rollout_stream import RolloutStream
from quartet.codec.trajectories import trajectory_to_bytes
from quartet.contract.generation import GenerationBatch, SamplingParameters, requests_of
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Prompt
from quartet.contract.weights import WeightTransfer
from quartet.errors import Cancelled, EngineFailed, FailedPrecondition, GroupWeightsChanged, InvalidRequest
from quartet.models.generation.torch_engine import DetachedTorchEngine, served_model
from quartet.models.weights.host_tensors import complete_tensors, host_tensor, named_weights
from quartet.rpc.clients import GenerationClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.services.actor.group_generation import GroupGeneration, rank_host
from quartet.services.actor.servicer import ActorServicer, RankServicer
from quartet.services.generator import attestation
from quartet.services.generator.generator import Generator, Progress
from quartet.services.orchestrator.rollout.generation import ActorGeneration
from quartet.weight_transfer.source import WeightSource
from tests.services.model_services import TIMEOUTS
from tests.unit.models import tiny
from tests.waiting import LIMIT, wait_until

RUN = "ranks"
PROMPTS = [Prompt(index, np.arange(2, 4 + index, dtype=np.int32)) for index in range(5)]
BATCH = GenerationBatch(RUN, 1, 1, requests_of(RUN, 1, PROMPTS, samples=2), SamplingParameters(12), 7, 0)


@pytest.fixture
def stream(redis_client: Any, redis_url: str) -> RolloutStream:
    result = RolloutStream(redis_client, redis_url, RUN)
    result.reset()
    return result


@pytest.fixture
def make_rank(stream: RolloutStream) -> Callable[[], Generator]:
    """Create the generator of a rank. Its engine holds the weights of a trainer as version 0."""

    def make() -> Generator:
        rank = generator_of(stream)
        rank.copy(0, complete_tensors(named_weights(tiny.causal("llama"))))
        return rank

    return make


def generator_of(stream: RolloutStream, source: WeightSource | None = None) -> Generator:
    """Return a generator with other weights than those that are published."""
    model = tiny.causal("llama", seed=9)
    served = served_model(model, frozenset([tiny.EOS]))
    engine = DetachedTorchEngine(model, None, served.stop_ids, 4)
    return Generator(lambda: engine, served, ServiceStatus(Role.ACTOR), lambda run: stream, held=source)


def serve(core: Any, compute: ComputeThread) -> Server:
    return Server([RankServicer(core, compute, lambda: ServiceStatus(Role.ACTOR))], "127.0.0.1:0")


def transfer_of(rank: Generator) -> WeightTransfer:
    transfer = rank.status().last_transfer
    assert transfer is not None
    return transfer


class Ranks:
    """A group of ranks in one process, each served over TCP."""

    def __init__(self, cores: Sequence[Any]) -> None:
        self.computes = [ComputeThread() for _ in cores]
        self.served = [serve(core, compute) for core, compute in zip(cores[1:], self.computes[1:], strict=True)]
        clients = [GenerationClient(each.address, TIMEOUTS, LOCAL, Role.ACTOR) for each in self.served]
        self.generation = GroupGeneration(cores[0], clients)

    def close(self) -> None:
        for each in self.served:
            each.stop(0.0)


@pytest.fixture
def group() -> Iterator[Callable[..., GroupGeneration]]:
    """Return the generation of rank 0 in a group of these cores."""
    groups: list[Ranks] = []

    def create(*cores: Any) -> GroupGeneration:
        groups.append(Ranks(cores))
        return groups[-1].generation

    yield create
    for each in groups:
        each.close()


def requested(rank: Generator, **changes: Any) -> GenerationBatch:
    held = transfer_of(rank)
    return replace(BATCH, policy_version=held.policy_version, weights_digest=held.weights_digest, **changes)


def written(stream: RolloutStream) -> list[bytes]:
    trajectories = [delivery.trajectory for delivery in stream.read(1000, 0.01)]
    stream.reset()
    return [trajectory_to_bytes(each) for each in sorted(trajectories, key=lambda each: each.id)]


def never() -> bool:
    return False


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_generate_the_trajectories_of_one(
    stream: RolloutStream, make_rank: Callable[[], Generator], group: Callable[..., GroupGeneration], size: int
) -> None:
    ranks = [make_rank() for _ in range(size)]
    expected_result = ranks[0].generate(requested(ranks[0]), never)
    expected = written(stream)
    seen: list[tuple[int, int]] = []
    started: list[None] = []
    result = group(*ranks).generate(
        requested(ranks[0]), never, lambda: started.append(None), lambda *numbers: seen.append(numbers)
    )
    assert (result, len(started)) == (expected_result, 1)
    assert written(stream) == expected
    assert seen[-1] == result
    assert seen == sorted(seen)
    generated = [rank.status().tokens["generated"] for rank in ranks]
    assert min(generated[1:]) > 0
    # Rank 0 has generated everything once before.
    assert sum(generated) == 2 * result[1]


def test_a_rank_that_holds_other_weights_is_an_error(
    stream: RolloutStream, make_rank: Callable[[], Generator], group: Callable[..., GroupGeneration]
) -> None:
    first, second = make_rank(), make_rank()
    second.copy(1, complete_tensors(named_weights(tiny.causal("llama", seed=3))))
    with pytest.raises(FailedPrecondition, match=r"generate with version 0 .* holds version 1"):
        group(first, second).generate(requested(first), never)


class Waiting:
    """Generation that waits until it is cancelled, or until ``end``."""

    def __init__(self, error: Exception | None = None, after: Sequence[Waiting] = ()) -> None:
        """``error`` is raised when all of ``after`` have started."""
        self.started, self.ended, self.error, self.after = threading.Event(), threading.Event(), error, after

    def generate(
        self, batch: GenerationBatch, cancelled: Callable[[], bool], on_start: Callable[[], None], on_progress: Progress
    ) -> tuple[int, int]:
        self.started.set()
        on_start()
        if self.error is not None:
            assert all(each.started.wait(LIMIT) for each in self.after)
            raise self.error
        try:
            while not cancelled():
                threading.Event().wait(0.01)
            raise Cancelled("no caller")
        finally:
            self.ended.set()

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.ACTOR)


def test_cancellation_reaches_all_ranks(group: Callable[..., GroupGeneration]) -> None:
    ranks = [Waiting(), Waiting(), Waiting()]
    with pytest.raises(Cancelled):
        group(*ranks).generate(BATCH, lambda: all(rank.started.is_set() for rank in ranks))
    assert all(rank.ended.wait(LIMIT) for rank in ranks)


def test_the_error_of_a_rank_ends_the_generation_of_the_others(group: Callable[..., GroupGeneration]) -> None:
    first, third = Waiting(), Waiting()
    with pytest.raises(InvalidRequest, match="too long"):
        group(first, Waiting(InvalidRequest("too long"), [first, third]), third).generate(BATCH, never)
    assert all(rank.ended.wait(LIMIT) for rank in (first, third))


def test_a_rank_that_is_gone_asks_for_a_restart_of_the_group() -> None:
    first, second = Waiting(), Waiting()
    ranks = Ranks([first, second])

    def end() -> None:
        second.started.wait(LIMIT)
        ranks.close()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(EngineFailed, match="rank 1: actor at 127"):
        ranks.generation.generate(BATCH, never)
    thread.join()


def test_a_failed_generation_ends_the_process_if_it_runs_on_a_thread_of_its_own() -> None:
    generation = ComputeThread()

    def fail(_: Callable[[], bool]) -> None:
        raise EngineFailed("rank 1: unavailable")

    servicer = ActorServicer(MagicMock(), ComputeThread(), 1, lambda: False, generation)
    with pytest.raises(EngineFailed):
        generation.run("generate", MagicMock(time_remaining=lambda: LIMIT), fail)
    assert servicer.failure() == "rank 1: unavailable"
    servicer.close()


@pytest.mark.parametrize("damaged", [0, 1])
def test_changed_weights_of_a_rank_end_the_step_and_are_counted_by_the_orchestrator(
    damaged: int,
    make_rank: Callable[[], Generator],
    group: Callable[..., GroupGeneration],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attestation, "SHARE", 1000.0)
    ranks = [make_rank(), make_rank()]
    weight = next(iter(ranks[damaged]._engine._weights.values()))
    with torch.no_grad():
        weight.view(-1)[0] += 1.0
    compute = ComputeThread()
    actor = serve(group(*ranks), compute)
    client = GenerationClient(actor.address, TIMEOUTS, LOCAL, Role.ACTOR)
    held = transfer_of(ranks[0])
    status = MagicMock(published_weights={held.policy_version: held.weights_digest})
    notes = MagicMock()
    generation = ActorGeneration(client, MagicMock(status=lambda: status), True, lambda *_: None, notes)
    _, work = generation.start(BATCH)
    with pytest.raises(
        GroupWeightsChanged, match=f"{'rank 1: ' if damaged else ''}.*have changed since version 0 was loaded"
    ):
        work.result()
    assert wait_until(lambda: generation.take_metrics(0)["weights_changed"]) == 1
    assert "have changed since" in compute.failure, "only a restart helps"
    actor.stop(0.0)


def test_an_engine_takes_over_tensors_that_are_made_one_after_the_other(stream: RolloutStream) -> None:
    rank, trainer = generator_of(stream), tiny.causal("llama")
    copied = rank.copy(3, complete_tensors(named_weights(trainer)))
    source = WeightSource()
    publish(source, 3, trainer)
    assert {copied.policy_version: copied.weights_digest} == source.published()
    size = sum(host_tensor(each).data.nbytes for each in named_weights(trainer).values())
    assert (copied.policy_version, copied.total_bytes) == (3, size)
    source.close()


def publish(source: WeightSource, version: int, policy: Any) -> None:
    source.publish(version, ((name, host_tensor(value)) for name, value in named_weights(policy).items()), None, RUN)


def test_an_engine_reads_older_versions_from_the_source_of_its_process(stream: RolloutStream) -> None:
    source = WeightSource(capacity=3)
    generator = generator_of(stream, source)
    policies = [tiny.causal("llama", seed=seed) for seed in range(2)]
    for version, policy in enumerate(policies):
        publish(source, version, policy)
    results = []
    for version in (0, 1, 0):
        generator.generate(replace(BATCH, policy_version=version, weights_digest=source.published()[version]), never)
        results.append(written(stream))
    assert results[0] == results[2] != results[1]
    source.close()


def test_ranks_on_several_machines_listen_where_rank_0_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29500"}
    assert rank_host(1, {}) == rank_host(1, environment) == "127.0.0.1"
    probe = MagicMock()
    probe.__enter__().getsockname.return_value = ("10.1.1.2", 4000)
    monkeypatch.setattr(socket, "socket", lambda *_: probe)
    assert rank_host(2, environment) == "10.1.1.2"
    probe.__enter__().connect.assert_called_once_with(("10.1.1.1", 29500))
