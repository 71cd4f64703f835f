"""Connections of the server of sessions: a client that stalls is disconnected, so that it holds no memory.

At the limit of connections, a new one replaces the one that has been without a request for longest. If all have requests, those
of further ones get an error in the shape of the others.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from quartet.services.generator.sessions.protocol import ProtocolError

HEADER_SECONDS = 30.0
"""Time limit for the headers of a request, from the first byte, or from the connection for the first request."""
WRITE_SECONDS = 60.0
"""Time for which a client may read nothing of an answer that it was sent."""
MAX_REFUSED = 64
"""Connections beyond the limit whose requests get an error. Further ones are closed at once."""


class SessionProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with time limits for headers and for readers, and a limit of open connections.

    uvicorn's own limit is one of requests: it leaves connections without a request open.
    """

    def __init__(self, idle: OrderedDict[SessionProtocol, None], *arguments: Any, **settings: Any) -> None:
        """``idle``: the connections without a request, which all of a server share."""
        super().__init__(*arguments, **settings)
        self._idle = idle
        # uvicorn would answer in plain text.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._headers: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Without it, an answer waits for the client to acknowledge its headers: asyncio sets it only for sockets that name TCP.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = self.loop.call_later(HEADER_SECONDS, transport.abort)
        if self._max_connections is None or len(self.connections) <= self._max_connections:
            self._idle[self] = None
        elif self._idle:
            longest, _ = self._idle.popitem(last=False)
            longest.transport.abort()
            self._idle[self] = None
        elif len(self.connections) <= self._max_connections + MAX_REFUSED:
            self.app = _overloaded(self._max_connections)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers = _without(self._headers)
            self._idle.pop(self, None)
        elif self._headers is None and not self.transport.is_closing():
            self._headers = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request may have come already.
        if self.cycle.response_complete and not self.transport.is_closing():
            self._idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _without(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers, self._writing = _without(self._headers), _without(self._writing)
        self._idle.pop(self, None)
        super().connection_lost(exc)


def _without(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer. Return None in its place."""
    if timer is not None:
        timer.cancel()
    return None


def _overloaded(connections: int) -> Any:
    """Return the application of a connection beyond the limit."""
    message = f"All {connections} connections of this process have requests that are being answered; try again later."
    error = ProtocolError(503, message, "overloaded")
    return JSONResponse(error.body, error.status, {"connection": "close"})
