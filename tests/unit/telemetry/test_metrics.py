"""Access to a process's metrics on loopback and beyond."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import CollectorRegistry

from quartet.telemetry.prometheus import GpuMemory, MetricsServer


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[MetricsServer]:
    """Start a metrics server at the host of the test's parameter."""
    result = MetricsServer(CollectorRegistry(), f"{request.param}:0")
    yield result
    result.stop()


def status(server: MetricsServer, host: str) -> int:
    """Return the HTTP status of a request with this Host header."""
    bound, _, port = server.address.rpartition(":")
    # "localhost" may be bound as ::1.
    connection = http.client.HTTPConnection(bound.replace("0.0.0.0", "127.0.0.1"), int(port), timeout=10)
    try:
        connection.request("GET", "/metrics", headers={"Host": host.replace("PORT", port)})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("server", ["127.0.0.1", "localhost"], indirect=True)
def test_on_loopback_a_request_with_a_foreign_host_name_is_refused(server: MetricsServer) -> None:
    hosts = ("127.0.0.1:PORT", "localhost:PORT", "LocalHost", "[::1]:PORT", "evil.example", "evil.example:PORT", "")
    assert [status(server, host) for host in hosts] == [200, 200, 200, 200, 421, 421, 421]


@pytest.mark.parametrize("server", ["0.0.0.0"], indirect=True)
def test_beyond_loopback_any_host_name_is_accepted(server: MetricsServer) -> None:
    assert status(server, "actor.internal:PORT") == 200


def test_metrics_do_not_start_the_cuda_driver_in_a_process_that_uses_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object) -> int:
        raise AssertionError("this starts the CUDA driver")

    for question in ("is_available", "device_count", "memory_allocated", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, question, started)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    [family] = GpuMemory().collect()
    assert not family.samples


def test_metrics_show_the_memory_of_each_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 + device)
    [family] = GpuMemory().collect()
    assert [(sample.labels["device"], sample.value) for sample in family.samples] == [("cuda:0", 5), ("cuda:1", 6)]
