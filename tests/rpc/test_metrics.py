"""Prometheus metrics of a service process, and their listen address."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from structlog.testing import capture_logs

from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.errors import Cancelled, ConfigError, FailedPrecondition, ServiceFailed
from quartet.rpc.call_interceptors import code_of_failure
from quartet.rpc.clients import ReferenceClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.server import Server
from quartet.services.observability import Observability
from quartet.v1 import status_pb2, status_pb2_grpc
from tests.e2e.forked_program import start as start_fork
from tests.rpc.test_server import BATCH, Gate, gated
from tests.services.model_services import Services
from tests.training.observed_runs import read, value
from tests.waiting import LIMIT, wait_until

ROOT = Path(__file__).parents[2]
SERVICE = "quartet.v1.ReferenceService"


@pytest.fixture
def observability(make_config: Callable[..., Config]) -> Observability:
    return Observability([Role.REFERENCE], make_config())


@pytest.fixture
def gate() -> Iterator[Gate]:
    result = Gate()
    yield result
    result.release.set()


@pytest.fixture
def compute() -> ComputeThread:
    return ComputeThread()


@pytest.fixture
def reference(
    gate: Gate, compute: ComputeThread, observability: Observability, services: Services
) -> Iterator[ReferenceClient]:
    role = gated(gate, compute)
    observability.add_services([role])
    observability.start()
    server = Server(
        [role], "127.0.0.1:0", interceptors=observability.interceptors, metrics_address=observability.address
    )
    client: ReferenceClient = services.client(Role.REFERENCE, server)
    yield client
    gate.release.set()
    server.stop(5.0)


def calls(observability: Observability, code: str) -> float:
    labels = {"service": SERVICE, "method": "LogProbs", "code": code}
    return read(observability.address).get(("quartet_rpc_requests_total", frozenset(labels.items())), 0.0)


def test_metrics_count_calls_in_flight_and_pending_work(
    reference: ReferenceClient, gate: Gate, observability: Observability
) -> None:
    pending = [reference.log_probs(BATCH, 1.0) for _ in range(3)]
    wait_until(lambda: value(read(observability.address), "quartet_work_pending") == 3)
    assert value(read(observability.address), "quartet_rpc_in_flight") == 3
    assert reference.wait_until_ready().work_pending == 3
    gate.release.set()
    for call in pending:
        call.result()
    wait_until(lambda: calls(observability, "OK") == 3)
    result = read(observability.address)
    assert value(result, "quartet_work_pending") == value(result, "quartet_rpc_in_flight") == 0
    assert value(result, "quartet_rpc_seconds_count", service=SERVICE, method="LogProbs") == 3
    assert value(result, "quartet_rpc_seconds_sum", service=SERVICE, method="LogProbs") > 0


@pytest.mark.parametrize(
    ("failure", "code"),
    [(FailedPrecondition("not now"), "FAILED_PRECONDITION"), (RuntimeError("a fault"), "INTERNAL")],
)
def test_failures_are_counted_by_status_code(
    reference: ReferenceClient, gate: Gate, observability: Observability, failure: Exception, code: str
) -> None:
    gate.failure = failure
    gate.release.set()
    with pytest.raises((FailedPrecondition, ServiceFailed)):
        reference.log_probs(BATCH, 1.0).result()
    wait_until(lambda: calls(observability, code) == 1)
    assert calls(observability, "OK") == 0


def test_a_cancelled_call_is_counted_as_cancelled(
    reference: ReferenceClient, gate: Gate, compute: ComputeThread, observability: Observability
) -> None:
    call = reference.log_probs(BATCH, 1.0)
    assert gate.started.wait(LIMIT)
    call.cancel()
    with pytest.raises(Cancelled):
        call.result()
    # The service learns of it later. If the work ended before, the call would be counted as OK.
    wait_until(lambda: compute._running is not None and compute._running[1].is_gone())
    gate.release.set()
    wait_until(lambda: calls(observability, "CANCELLED") == 1)


def test_the_status_contains_the_metrics_address(reference: ReferenceClient, observability: Observability) -> None:
    stub = status_pb2_grpc.StatusServiceStub(reference.channel.grpc_channel)
    status = stub.GetStatus(status_pb2.GetStatusRequest(), timeout=5)
    assert status.metrics_address == observability.address
    assert status.metrics_address.startswith("127.0.0.1:")
    assert not status.metrics_address.endswith(":0")


def test_metrics_beyond_loopback_require_allow_plaintext(make_config: Callable[..., Config]) -> None:
    section = {"reference": {"metrics_listen": "0.0.0.0:0"}}
    with pytest.raises(
        ConfigError, match=r"services\.reference\.metrics_listen: listen 0\.0\.0\.0:0: not a loopback address"
    ):
        Observability([Role.REFERENCE], make_config(services=section))
    observability = Observability([Role.REFERENCE], make_config(services=section, security={"allow_plaintext": True}))
    observability.start()
    assert value(read(observability.address.replace("0.0.0.0", "127.0.0.1")), "process_resident_memory_bytes") > 0


@pytest.fixture
def address_in_use() -> Iterator[str]:
    """Yield a HOST:PORT that is already in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def test_a_configured_address_that_is_in_use_is_a_config_error(
    make_config: Callable[..., Config], address_in_use: str
) -> None:
    observability = Observability([Role.CRITIC], make_config(services={"critic": {"metrics_listen": address_in_use}}))
    with pytest.raises(
        ConfigError, match=rf"^services\.critic\.metrics_listen {address_in_use}: cannot listen there .*another port"
    ):
        observability.start()


def test_without_a_configured_address_a_process_continues_without_metrics(
    make_config: Callable[..., Config], address_in_use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quartet.services.observability.DEFAULT_LISTEN", address_in_use)
    observability = Observability([Role.CRITIC], make_config())
    with capture_logs() as logs:
        observability.start()
    assert observability.address == ""
    assert [(line["event"], line["log_level"]) for line in logs] == [("metrics are not served", "warning")]
    assert f"metrics {address_in_use}: cannot listen there" in logs[0]["error"]


def test_a_process_reports_its_metrics_address_and_serves_metrics(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    # A service without a model: it starts in a second. See tests/training/test_observability.py for metrics of models.
    function = {"source": "function", "function": "quartet.verifiers.text:exact_match"}
    config = make_config(reward=function, telemetry={"otlp_endpoint": "http://127.0.0.1:9"})
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    reader, writer = os.pipe()
    with (tmp_path / "errors").open("wb") as errors:
        process = start_fork(
            [sys.executable, "-m", "quartet.services", "reward", "--config", str(path), "--ready-fd"],
            ROOT,
            {**os.environ, "OMP_NUM_THREADS": "1"},
            tmp_path,
            errors.fileno(),
            errors.fileno(),
            pipe=writer,
        )
    os.close(writer)
    try:
        with os.fdopen(reader) as pipe:
            ready: dict[str, Any] = yaml.safe_load(pipe.readline())
        with grpc.insecure_channel(ready["address"]) as channel:
            status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest(), timeout=10)
        assert status.metrics_address == ready["metrics_address"]
        result = read(ready["metrics_address"])
        labels = {"service": "quartet.v1.StatusService", "method": "GetStatus", "code": "OK"}
        assert value(result, "quartet_rpc_requests_total", **labels) == 1
    finally:
        process.terminate()
        start = time.monotonic()
        assert process.wait(LIMIT) == 0, (tmp_path / "errors").read_text()
        assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("set_code", "active", "expected"),
    [
        (None, False, "CANCELLED"),
        (None, True, "UNKNOWN"),
        (grpc.StatusCode.ABORTED, False, "ABORTED"),
    ],
)
def test_a_failed_call_is_counted_as_cancelled_if_its_caller_disconnected(
    set_code: grpc.StatusCode | None, active: bool, expected: str
) -> None:
    context: Any = SimpleNamespace(code=lambda: set_code, is_active=lambda: active)
    assert code_of_failure(context) == expected
