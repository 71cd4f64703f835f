"""The RPC server and its clients: listen addresses, drain, and the errors that a caller raises."""

from __future__ import annotations

import http.server
import inspect
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet import errors
from quartet.codec.messages import to_message
from quartet.config.deployment import SecurityConfig, TimeoutsConfig
from quartet.config.layout import check_listen_address
from quartet.config.root import Config
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.weights import ReferenceVersion
from quartet.errors import (
    Cancelled,
    ConfigError,
    FailedPrecondition,
    MismatchError,
    NoResponse,
    ServiceFailed,
    ServiceUnavailable,
)
from quartet.rpc import server as server_module
from quartet.rpc import service_channel
from quartet.rpc.clients import CriticClient, ReferenceClient, RewardClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.limits import MAX_CONCURRENT_CALLS, MAX_PENDING_SAVES, MAX_PENDING_WORK, MAX_STREAMS
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.server import Server
from quartet.rpc.service_channel import ServiceChannel
from quartet.services.reference.servicer import ReferenceServicer
from quartet.v1 import actor_pb2, actor_pb2_grpc, trajectory_pb2, update_pb2
from tests.ports import free_port
from tests.services.model_services import TIMEOUTS, Services
from tests.unit.models import tiny
from tests.waiting import LIMIT, wait_until

BATCH = tiny.batch([3, 2], [4, 7])


class Gate:
    """A fake model that blocks until the test releases it, and then returns or fails."""

    def __init__(self) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def log_probs(self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None) -> FloatArray:
        self.started.set()
        assert self.release.wait(LIMIT)
        if self.failure is not None:
            raise self.failure
        return np.zeros(int(batch.response_lengths.sum()), np.float32)

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.REFERENCE)


@pytest.fixture
def gate(services: Services) -> Iterator[Gate]:
    # Released before the services stop, because they wait for the pending work.
    result = Gate()
    yield result
    result.release.set()


def gated(gate: Gate, compute: ComputeThread | None = None) -> ReferenceServicer:
    return ReferenceServicer(gate, compute or ComputeThread(), 1)  # type: ignore[arg-type]


@pytest.fixture
def reference(gate: Gate, services: Services) -> ReferenceClient:
    client: ReferenceClient = services.client(Role.REFERENCE, services.serve(gated(gate)))
    return client


def test_a_port_in_use_is_refused(services: Services, gate: Gate) -> None:
    server = services.serve(gated(gate))
    with pytest.raises(ConfigError, match=f"listen {server.address}: the port is in use"):
        Server([gated(gate)], server.address)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"listen {address}: the port is in use"):
            Server([gated(gate)], address)


def test_a_restarted_server_waits_for_its_port(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def listen(server: grpc.Server, address: str) -> int:
            attempts.append(Credentials.listen(LOCAL, server, address))
            other.close()
            return attempts[-1]

        monkeypatch.setattr(LOCAL, "listen", listen)
        server = Server([gated(gate)], address, LOCAL, bind_seconds=60)
    server.stop(0)
    assert (attempts, server.address) == ([0, int(address.rpartition(":")[2])], address)


def test_a_stopped_server_releases_its_port(gate: Gate) -> None:
    server = Server([gated(gate)], "127.0.0.1:0")
    server.stop(0)
    second = Server([gated(gate)], server.address)
    assert second.address == server.address
    second.stop(0)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:7000", "[::]:0", "example.com:1", ":7000", "7000", ""])
def test_listening_beyond_loopback_in_plaintext_is_refused_unless_allowed(listen: str, gate: Gate) -> None:
    with pytest.raises(ConfigError, match=r"not a loopback address.*security\.allow_plaintext"):
        Server([gated(gate)], listen)
    check_listen_address(listen, allow_plaintext=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:0", "localhost:0"])
def test_loopback_addresses_are_accepted(listen: str) -> None:
    check_listen_address(listen, allow_plaintext=False)


def test_with_allow_plaintext_a_server_listens_beyond_loopback(gate: Gate) -> None:
    server = Server([gated(gate)], "0.0.0.0:0", Credentials("reward", SecurityConfig(allow_plaintext=True)))
    client = ReferenceClient(f"127.0.0.1:{server.address.rpartition(':')[2]}", TIMEOUTS)
    assert client.wait_until_ready().role is Role.REFERENCE
    client.close()
    server.stop(0)


def test_a_drain_finishes_the_active_call_and_refuses_new_ones(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "NOTICE_SECONDS", 20.0)
    server = Server([gated(gate)], "127.0.0.1:0")
    client = ReferenceClient(server.address, TIMEOUTS)
    watch = health_pb2_grpc.HealthStub(client.channel.grpc_channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    pending = client.log_probs(BATCH, 1.0)
    assert gate.started.wait(LIMIT)
    with ThreadPoolExecutor(1) as executor:
        stopping = executor.submit(server.stop, 20.0)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # The health watch reports the shutdown shortly before the port closes.
        while accepts_calls(server.address):
            assert not stopping.done()
        assert not stopping.done()
        gate.release.set()
        assert len(pending.result()) == 11
        watch.cancel()
        stopping.result(timeout=LIMIT)
    client.close()


def test_a_health_watch_does_not_prolong_a_drain(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "NOTICE_SECONDS", 0.1)
    server = Server([gated(gate)], "127.0.0.1:0")
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(1) as executor:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        executor.submit(server.stop, 60.0).result(timeout=LIMIT)
        with pytest.raises(grpc.RpcError) as ended:
            list(watch)
        # UNAVAILABLE if the connection closes first.
        assert ended.value.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert not server._health._watches


def accepts_calls(address: str) -> bool:
    """Return whether the server accepts a call on a new connection."""
    client = ReferenceClient(address, TIMEOUTS)
    try:
        client.channel.is_serving(5)
    except (ServiceUnavailable, NoResponse):  # A call during the close is cancelled.
        return False
    finally:
        client.close()
    return True


def test_a_call_cut_off_by_the_drain_is_an_error_of_the_service(gate: Gate) -> None:
    server = Server([gated(gate)], "127.0.0.1:0")
    client = ReferenceClient(server.address, TIMEOUTS)
    pending = client.log_probs(BATCH, 1.0)
    assert gate.started.wait(LIMIT)
    with ThreadPoolExecutor(1) as executor:
        stopping = executor.submit(server.stop, 0.05)
        with pytest.raises((ServiceFailed, ServiceUnavailable), match=r"^reference at "):
            pending.result()
        gate.release.set()
        stopping.result(timeout=LIMIT)
    client.close()


def test_a_caller_raises_the_error_class_of_the_service(gate: Gate, reference: ReferenceClient) -> None:
    gate.release.set()
    problems = []
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.QuartetError)]
    failures: list[Exception] = [kind("the cause") for kind in classes if kind is not errors.QuartetError]
    for failure in (*failures, torch.OutOfMemoryError("/secret/path"), RuntimeError("/secret/path")):
        expected = {
            errors.Cancelled: errors.NoResponse,
            errors.DeadlinePassed: errors.NoResponse,
            torch.OutOfMemoryError: errors.OutOfMemory,
            RuntimeError: errors.ServiceFailed,
        }.get(type(failure), type(failure))
        gate.failure = failure
        try:
            reference.log_probs(BATCH, 1.0).result()
        except errors.QuartetError as raised:
            text = str(raised)
            # The message of a function's failure starts with the function instead.
            prefix = (
                ""
                if issubclass(expected, errors.ScorerFailed)
                else f"reference at {reference.channel.address}: LogProbs: "
            )
            if type(raised) is not expected or not text.startswith(prefix) or "secret" in text:
                problems.append(f"{failure!r} arrives as {raised!r}")
    assert problems == []
    gate.failure = None
    assert len(reference.log_probs(BATCH, 1.0).result()) == 11


def test_a_cancelled_call_raises_cancelled(gate: Gate, reference: ReferenceClient) -> None:
    pending = reference.log_probs(BATCH, 1.0)
    assert gate.started.wait(LIMIT)
    pending.cancel()
    with pytest.raises(Cancelled, match="reference: LogProbs: cancelled"):
        pending.result()
    assert pending.done()


def test_a_passed_deadline_reports_service_method_and_seconds(gate: Gate, services: Services) -> None:
    timeouts = TIMEOUTS.model_copy(update={"score_seconds": 0.2})
    client = services.client(Role.REFERENCE, services.serve(gated(gate)), timeouts)
    with pytest.raises(ServiceFailed, match=r"^reference at 127.*: LogProbs: no response within 0\.2 s; if the work"):
        client.log_probs(BATCH, 1.0).result()


def test_an_address_without_a_server_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_channel, "FOREIGN_AFTER", 0.05)
    address = f"127.0.0.1:{free_port()}"
    client = RewardClient(address, TIMEOUTS)
    with pytest.raises(ServiceUnavailable, match=f"^reward at {address}: Score: unavailable"):
        client.score(BATCH).result()
    client.close()
    client = RewardClient(address, TimeoutsConfig(load_seconds=0.3))
    with pytest.raises(
        ServiceUnavailable, match=r"no Quartet service responded within 0\.3 s; start it, or correct serv"
    ):
        client.wait_until_ready()
    client.close()


def test_another_service_does_not_offer_the_method(reference: ReferenceClient, gate: Gate) -> None:
    critic = CriticClient(reference.channel.address, TIMEOUTS)
    with pytest.raises(MismatchError, match=r"critic at .*: Values: .*does not offer this method; check the address"):
        critic.values(BATCH).result()
    critic.close()


def test_a_wait_for_readiness_can_be_cancelled(services: Services) -> None:
    client = RewardClient(f"127.0.0.1:{free_port()}", TimeoutsConfig(load_seconds=60))

    def raise_cancelled() -> None:
        raise Cancelled("stopped")

    with pytest.raises(Cancelled, match="stopped"):
        client.wait_until_ready(raise_cancelled)
    client.close()


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_foreign_server_at_an_address_is_a_config_error(web_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_channel, "FOREIGN_AFTER", 0.5)
    client = RewardClient(web_server, TimeoutsConfig(load_seconds=60))
    expected = (
        rf"reward at {web_server}: the server there is not a Quartet service, or .*check services\.reward\.address"
    )
    with pytest.raises(ConfigError, match=expected):
        client.wait_until_ready()
    client.close()


def test_another_grpc_server_is_not_a_quartet_service() -> None:
    with ThreadPoolExecutor(2) as executor:
        server = grpc.server(executor)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        client = RewardClient(address, TimeoutsConfig(load_seconds=60))
        with pytest.raises(ConfigError, match="not a Quartet service"):
            client.wait_until_ready()
        client.close()
        server.stop(None).wait()


def test_wait_until_ready_waits_for_a_late_service(gate: Gate) -> None:
    address = f"127.0.0.1:{free_port()}"
    client = ReferenceClient(address, TimeoutsConfig(load_seconds=30))
    servers: list[Server] = []

    def on_attempt() -> None:
        # Called before each attempt. At the first attempt, no server listens.
        if attempts:
            servers or servers.append(Server([gated(gate)], address))
        attempts.append(1)

    attempts: list[int] = []
    assert client.wait_until_ready(on_attempt).role is Role.REFERENCE
    assert len(attempts) > 1
    client.close()
    servers[0].stop(0)


def test_an_actor_without_a_buffer_url_is_a_config_error(
    services: Services, make_config: Callable[..., Config]
) -> None:
    config: Any = make_config(buffer={"url": None})
    with pytest.raises(ConfigError, match=r"buffer\.url: null;.*QUARTET_BUFFER_URL"):
        services.build(Role.ACTOR, config)


def test_calls_without_a_deadline_succeed(services: Services, make_config: Callable[..., Config]) -> None:
    config = make_config()
    server = services.serve(services.build(Role.ACTOR, config))
    with grpc.insecure_channel(server.address) as channel:
        stub = actor_pb2_grpc.ActorServiceStub(channel)
        request = actor_pb2.ActorServiceLogProbsRequest(
            batch=to_message(trajectory_pb2.TokenBatch, BATCH), temperature=1.0
        )
        assert stub.LogProbs(request).log_probs.shape == [11]
        save = update_pb2.SaveRequest(run="run", directory="saved", kind=update_pb2.SAVE_KIND_MODEL)
        assert stub.Save(save).files


def test_streams_are_limited_so_that_health_and_status_respond(services: Services, gate: Gate) -> None:
    server = services.serve(ReferenceServicer(gate, ComputeThread(), 1))  # type: ignore[arg-type]
    with grpc.insecure_channel(server.address) as channel:
        health, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        streams = [health.Watch(request, timeout=30) for _ in range(MAX_STREAMS)]
        for stream in streams:
            assert next(stream).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            next(health.Watch(request, timeout=30))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.value.details() == "16 streams are open already; close one first"
        for _ in range(3):
            assert health.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        for stream in streams:
            stream.cancel()

        def stream_opens() -> bool:
            try:
                return bool(next(health.Watch(request, timeout=5)).status)
            except grpc.RpcError:
                return False

        wait_until(stream_opens)


def test_a_silent_stream_counts_as_lost(services: Services, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_channel, "SILENCE_SECONDS", 0.3)
    server = services.serve(ReferenceServicer(gate, ComputeThread(), 1))  # type: ignore[arg-type]
    channel = ServiceChannel("reference", server.address)
    watch = health_pb2_grpc.HealthStub(channel.grpc_channel).Watch
    handled = threading.Event()

    def handle(_: object) -> None:
        # The time that this takes is no silence of the service.
        handled.wait(0.6)
        assert not call.done()
        handled.set()

    call = channel.start_stream(
        watch, health_pb2.HealthCheckRequest(), 30, "Watch", lambda message: message, None, handle
    )
    with pytest.raises(ServiceUnavailable, match=r"reference at 127.*: Watch: no message for 0\.3 s"):
        call.result(LIMIT)
    assert handled.is_set()
    channel.close()


def test_all_limits_together_leave_workers_for_health_and_status() -> None:
    # A reward service also waits for its function thread; actor and critic also wait for saves.
    assert 2 * MAX_PENDING_WORK + 2 * MAX_PENDING_SAVES + MAX_STREAMS < MAX_CONCURRENT_CALLS


def test_a_very_long_error_message_arrives_with_its_status(services: Services, gate: Gate) -> None:
    server = services.serve(ReferenceServicer(gate, ComputeThread(), 1))  # type: ignore[arg-type]
    gate.failure = FailedPrecondition("\U0001f600" * 100_000)
    gate.release.set()
    client = services.client(Role.REFERENCE, server)
    with pytest.raises(FailedPrecondition, match="100000 characters"):
        client.log_probs(BATCH, 1.0).result()
