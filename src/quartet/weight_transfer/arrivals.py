"""The ranks of a trainer that connect to a receiver, among any other connections."""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import cast

NAME_BYTES = 32
"""Length of the name of a transfer."""
HELLO = struct.Struct(f"<{NAME_BYTES}sI")
"""What a rank says first: the name of the transfer, and its rank."""
MAX_WAITING = 128
"""Connections that have not said it. Beyond it, the oldest one is closed."""
WAKE_SECONDS = 0.1
"""A receiver that waits for ranks checks so often whether those that have come have failed."""


def arrivals(
    listener: socket.socket, name: str, missing: set[int], limit: float, failed: Callable[[], bool]
) -> Iterator[tuple[int, socket.socket]]:
    """Yield each rank that connects, and its connection, until none is ``missing``. Any other connection costs no time.

    ``name`` of the transfer. ``limit``: time of ``time.monotonic``. Raises OSError, also after the limit.
    """
    waiting: dict[socket.socket, bytes] = {}
    listener.setblocking(False)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(listener, selectors.EVENT_READ)

        @stack.callback
        def close_waiting() -> None:
            for each in waiting:
                each.close()

        def dropped(connection: socket.socket) -> bytes:
            selector.unregister(connection)
            return waiting.pop(connection)

        while missing and not failed():
            remaining = limit - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            for key, _ in selector.select(min(remaining, WAKE_SECONDS)):
                connection = cast(socket.socket, key.fileobj)
                if connection is listener:
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        connection = listener.accept()[0]
                        connection.setblocking(False)
                        waiting[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                try:
                    part = connection.recv(HELLO.size - len(waiting[connection]))
                except BlockingIOError:
                    continue
                except OSError:
                    part = b""
                waiting[connection] += part
                if part and len(waiting[connection]) < HELLO.size:
                    continue
                rank = _rank_of(dropped(connection), name)
                if rank not in missing:
                    connection.close()
                    continue
                missing.remove(rank)
                connection.settimeout(max(0.001, limit - time.monotonic()))
                yield rank, connection
            while len(waiting) > MAX_WAITING:
                oldest = next(iter(waiting))
                dropped(oldest)
                oldest.close()


def _rank_of(hello: bytes, name: str) -> int:
    """Return the rank that has connected; -1 for any other process."""
    if len(hello) != HELLO.size:
        return -1
    found, rank = HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(found, name.encode()) else -1
