"""Plain addresses on loopback for endpoints with TLS, so that agents need no certificate.

The certificates of processes name roles and not hosts (see ``quartet.rpc.security.credentials``), which clients of HTTP do not
know. The relay checks the role, and the agents of this machine speak HTTP to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from quartet.contract.status import Role
from quartet.errors import ServiceUnavailable

log = structlog.get_logger()

ROLES = tuple(f"{role}.quartet" for role in (Role.GENERATOR, Role.ACTOR))
"""Names in the certificate of a process that generates."""
MAX_TARGETS = 1024
"""Maximum number of endpoints. The oldest makes room for another: its process was replaced long ago."""
CONNECT_SECONDS = 10.0
"""Time limit for a connection to an endpoint, with its handshake."""
CHUNK_BYTES = 64 * 1024


class Relay:
    """Relays of connections to endpoints. Thread-safe."""

    def __init__(self, authority: Path) -> None:
        """Start. ``authority``: PEM file of the authority of all certificates."""
        self._tls = ssl.create_default_context(cafile=authority)
        # The certificate names a role, which is checked after the handshake.
        self._tls.check_hostname = False
        self._lock = threading.Lock()
        self._listeners: dict[str, tuple[asyncio.Server, int]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agent-relay", daemon=True)
        self._thread.start()

    def local_url(self, url: str) -> str:
        """Return a URL on loopback for an https:// URL. Other URLs are returned as they are. Raises ServiceUnavailable."""
        parts = urlsplit(url)
        if parts.scheme != "https":
            return url
        with self._lock:
            if parts.netloc not in self._listeners:
                if len(self._listeners) >= MAX_TARGETS:
                    server, _ = self._listeners.pop(next(iter(self._listeners)))
                    self._loop.call_soon_threadsafe(server.close)
                self._listeners[parts.netloc] = self._listen(parts.hostname or "", parts.port or 443)
            _, port = self._listeners[parts.netloc]
        return f"http://127.0.0.1:{port}{parts.path}"

    def close(self) -> None:
        """End all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _listen(self, host: str, port: int) -> tuple[asyncio.Server, int]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connect(host, port, reader, writer)

        async def start() -> asyncio.Server:
            return await asyncio.start_server(accept, "127.0.0.1", 0, limit=CHUNK_BYTES)

        try:
            server = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        except OSError as error:
            raise ServiceUnavailable(f"agents: no free port on 127.0.0.1 ({error.strerror})") from None
        return server, int(server.sockets[0].getsockname()[1])

    async def _connect(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until one side ends it."""
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    there = await asyncio.open_connection(host, port, ssl=self._tls, limit=CHUNK_BYTES)
                _check_role(there[1])
            except (OSError, TimeoutError) as error:
                # The agent sees a connection that ends, and tries again.
                log.warning("an endpoint of agents does not respond", address=f"{host}:{port}", error=str(error))
                writer.close()
                return
            copies = [asyncio.create_task(_copy(reader, there[1])), asyncio.create_task(_copy(there[0], writer))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                for end in (writer, there[1]):
                    end.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy until the end of ``source``. A slow ``target`` slows the source."""
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()


def _check_role(writer: asyncio.StreamWriter) -> None:
    """Raise OSError unless the certificate of the other side is that of a process that generates."""
    certificate = writer.get_extra_info("peercert") or {}
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if not set(ROLES) & set(names):
        writer.close()
        raise OSError(f"its certificate names {', '.join(names) or 'no process'}; expected one of {', '.join(ROLES)}")
