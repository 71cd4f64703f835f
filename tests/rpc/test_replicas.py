"""The number of processes behind an address."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from quartet.rpc.service_channel import endpoints_at, replicas_at


def test_an_address_counts_as_one_process_and_a_list_by_its_length() -> None:
    assert replicas_at("127.0.0.1:5000") == 1
    assert replicas_at("[::1]:5000") == 1
    assert replicas_at("ipv4:127.0.0.1:5000,127.0.0.1:5001,127.0.0.1:5002") == 3


def test_a_hostname_counts_its_addresses_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    ipv4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"10.0.0.{host}", 5000)) for host in range(4)]
    ipv6 = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"fd00::{host}", 5000, 0, 0)) for host in range(4)]

    def fake_getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("reward", 5000)
        return [*ipv4, *ipv6]

    monkeypatch.setattr(socket, "getaddrinfo", fake_getaddrinfo)
    assert replicas_at("reward:5000") == 4


def test_an_unknown_hostname_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fake_getaddrinfo)
    assert replicas_at("nowhere:5000") == 1


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
