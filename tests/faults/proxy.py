"""A TCP proxy between clients and one server, which can inject network faults."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

CHUNK = 65536
"""Bytes that pass at once."""


class Proxy:
    """Passes bytes on, both ways, until a fault is asked for. A context manager, or call ``close``."""

    def __init__(self, target: str) -> None:
        """``target`` is HOST:PORT or the path of a unix socket."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._held = self._refusing = self._closed = False
        self._connections: set[_Connection] = set()
        self.delay = 0.0
        """Seconds by which every portion is late, each way."""
        self.before_answer: Callable[[], None] | None = None
        """Called once, right before the next portion from the server is passed on: a request has arrived there by then."""
        threading.Thread(target=self._accept, name=f"proxy of {target}", daemon=True).start()

    def silence(self) -> None:
        """Nothing passes any more, either way, and no connection breaks: packets are lost until ``heal``, then sent again."""
        self._set(held=True)

    def reset(self) -> None:
        """Every connection breaks at once, and new ones are refused until ``heal``."""
        self._set(refusing=True)
        self._break(self._all())

    def forget(self) -> None:
        """On the connections that there are nothing passes ever again, and none is told; new ones work."""
        for connection in self._all():
            connection.forgotten = True

    def heal(self) -> None:
        """End ``silence`` and ``reset``."""
        self._set(held=False, refusing=False)

    def close(self) -> None:
        """Break every connection and listens no more."""
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
            answers = threading.Thread(target=self._pass_answers, args=(connection,), daemon=True)
            answers.start()
            self._pass(connection, client, connection.server)
            answers.join()
        except OSError:
            pass
        finally:
            self._end(connection)

    def _pass_answers(self, connection: _Connection) -> None:
        assert connection.server is not None
        self._pass(connection, connection.server, connection.client)

    def _pass(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        """Until one end is gone; then both are."""
        with contextlib.suppress(OSError):
            while portion := source.recv(CHUNK):
                if source is connection.server:
                    self._strike()
                if self.delay:
                    time.sleep(self.delay)
                self._wait_while_held(connection)
                if not connection.forgotten:
                    sink.sendall(portion)
        self._end(connection)

    def _strike(self) -> None:
        with self._changed:
            strike, self.before_answer = self.before_answer, None
        if strike is not None:
            strike()

    def _wait_while_held(self, connection: _Connection) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or connection.broken or self._closed)

    def _end(self, connection: _Connection) -> None:
        # Where nothing passes, the end of one side does not reach the other either.
        if not connection.forgotten or self._closed:
            self._break([connection])

    def _break(self, connections: list[_Connection]) -> None:
        for connection in connections:
            connection.break_off()
            with self._changed:
                self._connections.discard(connection)
                self._changed.notify_all()


class _Connection:
    """One client's connection, and the one to the server that goes with it."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server: socket.socket | None = None
        self.forgotten = self.broken = False

    def break_off(self) -> None:
        """Both ends see a connection that was reset."""
        self.broken = True
        for end in (self.client, self.server):
            if end is None:
                continue
            with contextlib.suppress(OSError):
                # To linger for no time at all is to reset; the shutdown wakes the thread that reads.
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
