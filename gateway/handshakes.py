"""Connections that are to be encrypted, until hands are shaken: for a limited time, and a limited number of them.

asyncio's own TLS servers show a connection to nobody before that, so nobody could make room for others.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quartet.gateway.connections import Connection

MOST = 128
"""Handshakes at a time; one more drops the oldest."""
WITHIN = 10.0
"""Seconds that a handshake may take."""


def encrypted(certificate: Path, key: Path) -> Callable[..., asyncio.Protocol]:
    """What makes a protocol for each connection of an HTTPS server, as uvicorn asks for it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    under_way: dict[Handshake, None] = {}

    def begin(**given: Any) -> asyncio.Protocol:
        return Handshake(lambda: Connection(**given), context, under_way)

    return begin


class Handshake(asyncio.Protocol):
    """One connection until it is a ``Connection``'s. What comes right behind the handshake is kept for that."""

    def __init__(
        self, make: Callable[[], Connection], context: ssl.SSLContext, under_way: dict[Handshake, None]
    ) -> None:
        """``under_way``: those of this server, the oldest first."""
        self._make, self._context, self._under_way = make, context, under_way
        self._received: list[bytes] = []
        self._ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        self._transport = transport
        self._under_way[self] = None
        if len(self._under_way) > MOST:
            next(iter(self._under_way)).drop()
        self._task = asyncio.get_running_loop().create_task(self._shake())

    def data_received(self, data: bytes) -> None:
        """Of asyncio: decrypted already."""
        self._received.append(data)

    def eof_received(self) -> None:
        """Of asyncio."""
        self._ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._ended = True

    def drop(self) -> None:
        """Ends it at once."""
        self._under_way.pop(self, None)
        # First: TLS that goes on over a transport that is gone keeps its buffers for as long as a handshake may take.
        self._task.cancel()
        self._transport.abort()

    async def _shake(self) -> None:
        try:
            transport = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=WITHIN,
                ssl_shutdown_timeout=WITHIN,
            )
        except OSError:  # TLS's own errors and a time that is over among them.
            return
        finally:
            self._under_way.pop(self, None)
        if transport is None or self._ended:
            self._transport.abort()
            return
        connection = self._make()
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._received:
            connection.data_received(b"".join(self._received))
