"""Access to a process's metrics on loopback and beyond."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from quartet.telemetry.prometheus import MetricsServer


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
