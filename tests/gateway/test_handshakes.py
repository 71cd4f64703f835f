"""The gateway's own HTTPS: whoever connects and never shakes hands is not waited for, and keeps nobody out."""

from __future__ import annotations

import gc
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from quartet.gateway import connections, handshakes
from quartet.rpc.security.certificate_authority import Authority
from tests.gateway.serving import PATIENCE, TOKEN, Gateway, a_run, serving
from tests.gateway.test_connections import connected, is_closed


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    a_run(tmp_path, steps=1)
    Authority(timedelta(days=1)).issue(tmp_path / "tls", ["127.0.0.1", "localhost"])
    with serving(tmp_path, certificate=tmp_path / "tls/tls.crt", key=tmp_path / "tls/tls.key") as found:
        yield found


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "tls/ca.crt")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "a beginning"])
def test_a_handshake_that_does_not_come_is_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(handshakes, "WITHIN", 0.2)
    with connected(gateway, sent) as silent:
        assert is_closed(silent)
    assert gateway.client.get("/session").status_code == 200


def test_nor_is_a_request_that_does_not_come_after_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    with trusting(tmp_path).wrap_socket(connected(gateway), server_hostname="localhost") as silent:
        assert is_closed(silent)


def test_the_oldest_of_too_many_handshakes_make_way(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MOST", 4)
    monkeypatch.setattr(handshakes, "WITHIN", 10 * PATIENCE)
    gateway.client.close()
    with ExitStack() as open_ones:
        silent = [open_ones.enter_context(connected(gateway)) for _ in range(12)]
        assert all(is_closed(connection) for connection in silent[:8])
        assert b"200 OK" in asked_with_the_end_of_the_handshake(gateway)


def test_those_that_made_way_leave_nothing_behind(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "MOST", 4)
    monkeypatch.setattr(handshakes, "WITHIN", 10 * PATIENCE)
    gateway.client.close()
    with ExitStack() as open_ones:
        for _ in range(40):
            silent = open_ones.enter_context(connected(gateway))
        for _ in range(4):
            open_ones.enter_context(connected(gateway))
        assert is_closed(silent)
        gc.collect()
        # Each has a buffer of 256 KiB.
        assert sum(type(found) is SSLProtocol for found in gc.get_objects()) <= 12


def test_what_is_no_tls_is_hung_up_on(gateway: Gateway) -> None:
    with connected(gateway, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") as plain:
        assert b"HTTP" not in plain.recv(1024)
        assert is_closed(plain)


def test_a_request_right_behind_the_handshake_is_not_lost(gateway: Gateway) -> None:
    assert b"200 OK" in asked_with_the_end_of_the_handshake(gateway)


def asked_with_the_end_of_the_handshake(gateway: Gateway) -> bytes:
    """The beginning of the answer to a request that goes out in one piece with the handshake's last message."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    with connected(gateway) as connection:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        tls.write(f"GET /api/v1/session HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        connection.sendall(outgoing.read())
        return decrypted(tls, incoming, connection)


def decrypted(tls: ssl.SSLObject, incoming: ssl.MemoryBIO, connection: socket.socket) -> bytes:
    connection.settimeout(PATIENCE)
    while True:
        try:
            return tls.read(1024)
        except ssl.SSLWantReadError:
            incoming.write(connection.recv(65536))
