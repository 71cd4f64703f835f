"""A TCP proxy between clients and one server, which can inject network faults."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

CHUNK = 65536
"""Bytes of a portion."""


class Proxy:
    """Proxy that forwards bytes in both directions, and injects faults on request. A context manager, or call ``close``."""

    def __init__(self, target: str) -> None:
        """``target`` is HOST:PORT or the path of a unix socket."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._held = self._refusing = self._closed = False
        self._connections: set[_Connection] = set()
        self.delay = 0.0
        """Seconds by which every portion is delayed, in each direction."""
        self.before_response: Callable[[], None] | None = None
        """Called once, right before the proxy forwards the next portion from the server, which has then received a request."""
        threading.Thread(target=self._accept, name=f"proxy of {target}", daemon=True).start()

    def silence(self) -> None:
        """Forward nothing until ``heal``, and keep connections open, like a network that loses all packets."""
        self._set(held=True)

    def reset(self) -> None:
        """Reset every connection, and refuse new ones until ``heal``."""
        self._set(refusing=True)
        self._break(self._all())

    def forget(self) -> None:
        """Forward nothing more on existing connections and keep them open. New connections work."""
        for connection in self._all():
            connection.forgotten = True

    def heal(self) -> None:
        """End ``silence`` and ``reset``."""
        self._set(held=False, refusing=False)

    def close(self) -> None:
        """Reset every connection and stop listening."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break(self._all())

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set(self, **values: bool) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, f"_{name}", value)
            self._changed.notify_all()

    def _all(self) -> list[_Connection]:
        with self._changed:
            return list(self._connections)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        connection = _Connection(client)
        with self._changed:
            refused = self._refusing or self._closed
            if not refused:
                self._connections.add(connection)
        try:
            if refused:
                return
            self._wait_while_held(connection)
            connection.server = _connect(self._target)
            responses = threading.Thread(target=self._forward_responses, args=(connection,), daemon=True)
            responses.start()
            self._forward(connection, client, connection.server)
            responses.join()
        except OSError:
            pass
        finally:
            self._end(connection)

    def _forward_responses(self, connection: _Connection) -> None:
        assert connection.server is not None
        self._forward(connection, connection.server, connection.client)

    def _forward(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        """Forward until one end closes, then close both."""
        with contextlib.suppress(OSError):
            while portion := source.recv(CHUNK):
                if source is connection.server:
                    self._inject()
                if self.delay:
                    time.sleep(self.delay)
                self._wait_while_held(connection)
                if not connection.forgotten:
                    sink.sendall(portion)
        self._end(connection)

    def _inject(self) -> None:
        with self._changed:
            inject, self.before_response = self.before_response, None
        if inject is not None:
            inject()

    def _wait_while_held(self, connection: _Connection) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or connection.broken or self._closed)

    def _end(self, connection: _Connection) -> None:
        # On a forgotten connection, the end of one side does not reach the other.
        if not connection.forgotten or self._closed:
            self._break([connection])

    def _break(self, connections: list[_Connection]) -> None:
        for connection in connections:
            connection.reset()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()


class _Connection:
    """A connection of a client, and the matching connection to the server."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.forgotten = self.broken = False

    def reset(self) -> None:
        """Reset the connection at both ends."""
        self.broken = True
        for end in (self.client, self.server):
            if end is None:
                continue
            with contextlib.suppress(OSError):
                # Closing with a linger time of 0 resets the connection. The shutdown wakes the reading thread.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
            end.close()


def _connect(target: str) -> socket.socket:
    if target.startswith("/"):
        server = socket.socket(socket.AF_UNIX)
        server.connect(target)
        return server
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)))
