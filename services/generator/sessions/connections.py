"""Connections of the server of sessions: a client that stalls is disconnected, so that it holds no memory.

Beyond the limit of connections, a request gets an error in the shape of the others.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from quartet.services.generator.sessions.protocol import ProtocolError

HEADER_SECONDS = 30.0
"""Time limit for the headers of a request, from the first byte, or from the connection for the first request."""
WRITE_SECONDS = 60.0
"""Time for which a client may read nothing of an answer that it was sent."""


class SessionProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with time limits for headers and for readers. uvicorn has none."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # uvicorn would answer in plain text.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._headers: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self.app = _overloaded(self._max_connections)
        self._headers = self.loop.call_later(HEADER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers = _without(self._headers)
        elif self._headers is None and not self.transport.is_closing():
            self._headers = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _without(self._writing)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers, self._writing = _without(self._headers), _without(self._writing)
        super().connection_lost(exc)


def _without(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer. Return None in its place."""
    if timer is not None:
        timer.cancel()
    return None


def _overloaded(connections: int) -> Any:
    """Return the application of a connection beyond the limit."""
    error = ProtocolError(503, f"This process has {connections} connections already; try again later.", "overloaded")
    return JSONResponse(error.body, error.status, {"connection": "close"})
