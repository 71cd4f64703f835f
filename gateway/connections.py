"""The gateway's connections: each has a time by which it must have asked, and those that nobody uses make way for others.

So whoever has no token cannot keep out who has one, and what is answered before the app sees the request is a problem, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from quartet.gateway.access import CALLER, SECURITY_HEADERS
from quartet.gateway.http_errors import problem_response

MOST = 512
"""Connections that are served at a time."""
MAX_OF_AN_ADDRESS = 384
"""The same of one client's address."""
REQUEST_WITHIN = 10.0
"""Seconds in which a request must have come whole, from the connection's beginning or the request's first byte."""


class Connection(H11Protocol):
    """One connection of uvicorn's, h11 being its parser."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._too_slow: asyncio.TimerHandle | None = None
        self._spare_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Of asyncio."""
        super().connection_made(transport)
        self._spare_since = self.loop.time()
        self._expect()
        everybody = {other for other in self.connections if isinstance(other, Connection)}
        neighbours = {other for other in everybody if other.address == self.address}
        for others, most in ((neighbours, MAX_OF_AN_ADDRESS), (everybody, MOST)):
            if len(others) > most and not self._make_room(others):
                self.app = _full
                return

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._expect_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Of asyncio."""
        super().data_received(data)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._expect()
        else:
            self._expect_no_more()

    def on_response_complete(self) -> None:
        """Of uvicorn."""
        self._spare_since = self.loop.time()
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # Of a request that came right behind.
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """Of uvicorn: its own answer is plain text without our headers."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # Half an answer is out already.
            self.transport.close()
            return
        answer = problem_response(400, f"{msg} Expected HTTP/1.1.", headers=SECURITY_HEADERS)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        body = bytes(answer.body)
        for event in (
            h11.Response(status_code=400, headers=headers, reason=STATUS_PHRASES[400]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def address(self) -> str:
        """The client's."""
        return self.client[0] if self.client else "unknown"

    @property
    def spare(self) -> bool:
        """Whether no request is in hand of somebody who has shown a token: without one, not reading the answer is no claim."""
        return self.cycle is None or self.cycle.response_complete or CALLER not in self.cycle.scope

    def drop(self) -> None:
        """Ends it at once, whatever is still to be sent."""
        self.connections.discard(self)
        self._expect_no_more()
        self.transport.abort()

    def _make_room(self, others: set[Connection]) -> bool:
        """Drops the one that has been spare for longest, first of those that never asked anything."""
        spare = [other for other in others if other is not self and other.spare]
        if not spare:
            return False
        min(spare, key=lambda other: (other.cycle is not None, other._spare_since)).drop()
        return True

    def _expect(self) -> None:
        if self._too_slow is None:
            self._too_slow = self.loop.call_later(REQUEST_WITHIN, self.drop)

    def _expect_no_more(self) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    answer = problem_response(
        503,
        "too many connections are open; close some, or try again",
        headers={**SECURITY_HEADERS, "connection": "close"},
    )
    await answer(scope, receive, send)
