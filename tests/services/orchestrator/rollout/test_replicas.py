"""Replicas of a frozen model: the split by load, the loss and return of one, and replicas that have another model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from quartet.config.deployment import TimeoutsConfig
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.weights import ReferenceVersion
from quartet.errors import (
    Cancelled,
    ComputationFailed,
    MismatchError,
    NoResponse,
    QuartetError,
    QuotaExceeded,
    ServiceUnavailable,
)
from quartet.rpc import replica_set as module
from quartet.rpc.clients import ReferenceClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.replica_set import FrozenReplicas
from quartet.rpc.server import Server
from quartet.services.reference.servicer import ReferenceServicer
from tests.e2e.commands import ends
from tests.unit.models import tiny
from tests.waiting import LIMIT, wait_until

STATUS = ServiceStatus(Role.REFERENCE, model="m", dtype="float32", parameters=3, vocabulary_size=9)
BATCH = tiny.batch([2, 3], [4, 1])


class Model:
    """A reference whose log-probs are the token ids. ``free`` lets its calls end."""

    def __init__(self, status: ServiceStatus = STATUS) -> None:
        self.calls, self.free, self._status = 0, threading.Event(), status
        self.error: QuartetError | None = None

    def status(self) -> ServiceStatus:
        return self._status

    def log_probs(self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None) -> FloatArray:
        self.calls += 1
        assert self.free.wait(LIMIT)
        if self.error is not None:
            raise self.error
        return np.full(int(batch.response_lengths.sum()), temperature, np.float32)


class Service:
    """A process of the reference service, which can end and start again at its address."""

    def __init__(self, model: Model, free: bool = True) -> None:
        self.model, self.address = model, "127.0.0.1:0"
        if free:
            model.free.set()
        self.start()

    def start(self) -> None:
        self.server = Server([ReferenceServicer(self.model, ComputeThread(), 1)], self.address)  # type: ignore[arg-type]
        self.address = self.server.address

    def end(self) -> None:
        self.server.stop(0.0)


def log_probs(replicas: FrozenReplicas[ReferenceClient], temperature: float) -> Future[FloatArray]:
    return replicas.start(lambda client: client.log_probs(BATCH, temperature))


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Start a service. All are stopped after the test."""
    services: list[Service] = []

    def start(model: Model | None = None, free: bool = True) -> Service:
        services.append(Service(model or Model(), free))
        return services[-1]

    yield start
    for service in services:
        service.model.free.set()
        service.end()


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def connect(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FrozenReplicas[ReferenceClient]]]:
    """Create the replicas at the addresses of services. All are closed after the test."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.3)
    created: list[FrozenReplicas[ReferenceClient]] = []

    def create(*addresses: str, **timeouts: float) -> FrozenReplicas[ReferenceClient]:
        limits = TimeoutsConfig(**timeouts)
        created.append(
            FrozenReplicas(Role.REFERENCE, addresses, lambda address: ReferenceClient(address, limits), notes.append)
        )
        return created[-1]

    yield create
    for each in created:
        each.close()


def test_calls_go_to_the_replica_with_the_fewest(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    busy, free = serve(free=False), serve()
    replicas = connect(busy.address, free.address)
    assert replicas.wait_until_ready().model == "m"
    assert replicas.replicas() == 2
    first = log_probs(replicas, 0.5)
    for _ in range(3):
        assert log_probs(replicas, 0.7).result().tolist() == pytest.approx([0.7] * 5)
    assert (busy.model.calls, free.model.calls) == (1, 3)
    busy.model.free.set()
    assert first.result().tolist() == [0.5] * 5


def test_another_replica_repeats_the_calls_of_a_lost_one_which_gets_calls_again_when_it_is_back(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]], notes: list[str]
) -> None:
    lost, other = serve(free=False), serve()
    replicas = connect(lost.address, other.address)
    replicas.wait_until_ready()
    ended = threading.Event()
    call = log_probs(replicas, 0.5)
    call.add_done_callback(lambda _: ended.set())
    wait_until(lambda: lost.model.calls == 1)
    lost.end()
    assert ended.wait(LIMIT)
    assert call.result().tolist() == [0.5] * 5
    assert (replicas.replicas(), other.model.calls) == (1, 1)
    assert notes == [f"reference at {lost.address} is lost; the other replicas do its work"]
    lost.model.free.set()
    lost.start()
    wait_until(lambda: replicas.replicas() == 2)
    assert notes[1:] == [f"reference at {lost.address} is back"]
    log_probs(replicas, 0.5).result()
    assert (lost.model.calls, other.model.calls) == (2, 1)


def test_a_replica_that_does_not_respond_in_time_is_not_asked_twice(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    hung, other = serve(free=False), serve()
    replicas = connect(hung.address, other.address, score_seconds=0.5)
    replicas.wait_until_ready()
    assert log_probs(replicas, 0.5).result().tolist() == [0.5] * 5
    other.end()
    with pytest.raises(QuartetError) as raised:
        log_probs(replicas, 0.5).result()
    assert isinstance(raised.value, NoResponse | ServiceUnavailable)


def test_an_error_of_the_batch_is_not_repeated(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    first, second = serve(), serve()
    first.model.error = ComputationFailed("not finite")
    replicas = connect(first.address, second.address)
    replicas.wait_until_ready()
    with pytest.raises(ComputationFailed, match="not finite"):
        log_probs(replicas, 0.5).result()
    assert second.model.calls == 0


def test_without_a_replica_the_call_names_the_last_error(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    first, second = serve(), serve()
    replicas = connect(first.address, second.address)
    replicas.wait_until_ready()
    first.end()
    second.end()
    with pytest.raises(ServiceUnavailable, match=f"reference at {second.address}"):
        log_probs(replicas, 0.5).result()


def test_cancellation_goes_to_no_other_replica(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    first, second = serve(free=False), serve()
    replicas = connect(first.address, second.address)
    replicas.wait_until_ready()
    call = log_probs(replicas, 0.5)
    call.cancel()
    with pytest.raises(Cancelled):
        call.result()
    assert second.model.calls == 0


def test_closing_ends_all_calls_in_progress(serve: Callable[..., Service], notes: list[str]) -> None:
    busy = serve(free=False)
    replicas = FrozenReplicas(
        Role.REFERENCE, [busy.address], lambda address: ReferenceClient(address, TimeoutsConfig()), notes.append
    )
    replicas.wait_until_ready()
    calls = [log_probs(replicas, 0.5) for _ in range(4)]
    wait_until(lambda: busy.model.calls == 1)
    # gRPC runs the callbacks of all calls in one thread, and waits for them when it closes the channel.
    assert ends(replicas.close, 20)
    for call in calls:
        with pytest.raises(QuartetError, match="cancelled"):
            call.result()


def test_replicas_with_different_models_are_an_error_at_the_start(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    first, second = serve(), serve(Model(replace(STATUS, dtype="bfloat16")))
    with pytest.raises(MismatchError, match=r"has dtype '(bfloat16|float32)', expected '(bfloat16|float32)'"):
        connect(first.address, second.address).wait_until_ready()


def test_a_replica_that_comes_back_with_another_model_gets_no_calls(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]], notes: list[str]
) -> None:
    first, second = serve(free=False), serve()
    replicas = connect(first.address, second.address)
    replicas.wait_until_ready()
    calls = [log_probs(replicas, 0.5)]
    second.end()
    calls.append(log_probs(replicas, 0.5))
    wait_until(lambda: replicas.replicas() == 1)
    first.model.free.set()
    assert all(call.result().tolist() == [0.5] * 5 for call in calls)
    second.model = Model(replace(STATUS, parameters=4))
    second.start()
    wait_until(lambda: any("gets no work: has parameters 4, expected 3" in note for note in notes))
    assert replicas.replicas() == 1
    # The run can still recover from other failures.
    assert replicas.wait_until_ready().parameters == 3


def test_a_run_starts_without_a_replica_that_does_not_respond(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]], notes: list[str]
) -> None:
    first, second = serve(), serve()
    second.end()
    replicas = connect(first.address, second.address)
    replicas.wait_until_ready()
    assert notes == [f"reference at {second.address} does not respond; the other replicas do its work"]
    second.start()
    wait_until(lambda: replicas.replicas() == 2)


def test_a_name_with_several_addresses_stands_for_a_replica_at_each(
    serve: Callable[..., Service],
    connect: Callable[..., FrozenReplicas[ReferenceClient]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = [serve(), serve(), serve()]
    known = [service.address for service in services[:2]]
    monkeypatch.setattr(module, "endpoints_at", lambda address: list(known))
    monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.02)
    replicas = connect("reference:7003")
    replicas.wait_until_ready()
    assert replicas.replicas() == 2
    known[:] = [service.address for service in services[1:]]
    wait_until(lambda: set(replicas._by_address) == set(known))
    wait_until(lambda: replicas.replicas() == 2)


def test_a_refusal_by_quota_counts_more_than_the_loss_of_another_replica(
    serve: Callable[..., Service], connect: Callable[..., FrozenReplicas[ReferenceClient]]
) -> None:
    """A call that one replica refuses for a moment, while another one is lost, waits instead of failing."""
    refusing, lost = serve(), serve()
    replicas = connect(refusing.address, lost.address)
    replicas.wait_until_ready()
    refusing.model.error = QuotaExceeded("run a: too many calls", 0.02)
    lost.end()
    calls = [log_probs(replicas, 1.0) for _ in range(4)]
    wait_until(lambda: refusing.model.calls > 12)
    assert not any(call.done() for call in calls)
    refusing.model.error = None
    assert [call.result(LIMIT).tolist() for call in calls] == [[1.0] * 5] * 4
