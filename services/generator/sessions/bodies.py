"""Bodies of requests: their limits, and the memory that they share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress

from starlette.requests import ClientDisconnect, Request

from quartet.services.generator.sessions.protocol import ProtocolError

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Size of a request's body."""
MAX_BODIES_BYTES = 32 * MAX_BODY_BYTES
"""Size of all bodies whose requests are being answered. Further requests wait before they are read. One session, or one key of
users, has a quarter of it."""
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes of a refused body that are read and dropped, so that its client reads the error instead of a closed connection."""
BODY_SECONDS, DISCARD_SECONDS = 60.0, 5.0
"""Time limit for receiving a body, and for receiving a refused one."""


class Body:
    """The body of a request, whose size is limited."""

    def __init__(self, request: Request) -> None:
        self._request, self._is_received = request, False

    def size(self) -> int:
        """Return the size of the body, or the limit if it is not declared. Raises ProtocolError above the limit."""
        length = self._request.headers.get("content-length")
        size = int(length) if length is not None and length.isdecimal() else MAX_BODY_BYTES
        if size > MAX_BODY_BYTES:
            raise _too_large()
        return size

    async def read(self) -> bytes:
        """Return the body. Raises ProtocolError if it is too large or too slow, ClientDisconnect."""
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in self._parts():
                    size += len(part)
                    if size > MAX_BODY_BYTES:
                        raise _too_large()
                    parts.append(part)
        except TimeoutError:
            raise ProtocolError(408, f"The body did not arrive within {BODY_SECONDS:.0f} s.", "timeout") from None
        return b"".join(parts)

    async def discard(self) -> None:
        """Drop the rest of a refused body: a client that still sends would not read the error."""
        size = 0
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARD_SECONDS):
                async for part in self._parts():
                    size += len(part)
                    if size > MAX_DISCARDED_BYTES:
                        return

    async def _parts(self) -> AsyncIterator[bytes]:
        while not self._is_received:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._is_received = not message.get("more_body", False)
            yield message.get("body", b"")


class TakenBytes:
    """Bytes that a request has taken from a budget."""

    def __init__(self, budget: ByteBudget, owner: Hashable, size: int) -> None:
        self._budget, self.owner, self.size = budget, owner, size
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def reduce(self, size: int) -> None:
        """Give back all but ``size`` bytes."""
        self._budget.give_back(self, self.size - size)


class ByteBudget:
    """Bytes that requests share. They wait in order, and no owner has more than ``share``. For one event loop."""

    def __init__(self, size: int, share: int) -> None:
        self._free, self._share = size, share
        self._held = Counter[Hashable]()
        self._waiting: list[TakenBytes] = []

    @asynccontextmanager
    async def taken(self, owner: Hashable, size: int) -> AsyncIterator[TakenBytes]:
        """Take ``size`` bytes inside the context, once they are free."""
        taken = TakenBytes(self, owner, size)
        self._waiting.append(taken)
        self._admit()
        try:
            await taken.turn
            yield taken
        finally:
            if taken in self._waiting:
                self._waiting.remove(taken)
                self._admit()
            else:
                self.give_back(taken, taken.size)

    def give_back(self, taken: TakenBytes, size: int) -> None:
        """Give back a part of what was taken."""
        taken.size -= size
        self._free += size
        self._held[taken.owner] -= size
        if not self._held[taken.owner]:
            del self._held[taken.owner]
        self._admit()

    def _admit(self) -> None:
        for waiting in list(self._waiting):
            if waiting.turn.done() or self._held[waiting.owner] + waiting.size > self._share:
                continue  # Those of others need not wait for it.
            if waiting.size > self._free:
                return
            self._waiting.remove(waiting)
            self._free -= waiting.size
            self._held[waiting.owner] += waiting.size
            waiting.turn.set_result(None)


def _too_large() -> ProtocolError:
    return ProtocolError(413, f"The body is larger than {MAX_BODY_BYTES} bytes; send less.", "request_too_large")
