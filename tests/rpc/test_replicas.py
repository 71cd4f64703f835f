"""The processes behind an address."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from quartet.rpc.service_channel import endpoints_at


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["10.0.0.1"], ["generator:5000"]),
        (["10.0.0.2", "10.0.0.1", "fd00::1"], ["10.0.0.1:5000", "10.0.0.2:5000"]),
        (["fd00::2", "fd00::1"], ["[fd00::1]:5000", "[fd00::2]:5000"]),
        ([], []),
    ],
)
def test_each_process_behind_a_name_has_an_endpoint(
    hosts: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("generator", 5000)
        if not hosts:
            raise socket.gaierror("unknown")
        families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in hosts]
        return [(family, socket.SOCK_STREAM, 6, "", (each, 5000)) for family, each in zip(families, hosts, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", fake_getaddrinfo)
    assert endpoints_at("generator:5000") == expected
