"""The stream of live news."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quartet.gateway.access import Viewer
from quartet.gateway.events.jsonl_tail import Place
from quartet.gateway.http_errors import ProblemError, WrongField
from quartet.gateway.routing import RunName, TheLive, api_router
from quartet.gateway.schemas import Access

router = api_router("live")

MAX_STREAMS = 128
"""Of each token: commands always find room beside them."""
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""For proxies: each event is to be passed on when it comes."""


class EventStream(StreamingResponse):
    """Events as bytes: each is made once for all who listen, which FastAPI's own class would do anew for each."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], access: Access, open_ones: Counter[Access]) -> None:
        super().__init__(events, headers=HEADERS)
        self._access, self._open_ones = access, open_ones

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        self._open_ones[self._access] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open_ones[self._access] -= 1


@router.get("/runs/{run}/events", response_class=EventStream, status_code=200)
async def events(
    run: RunName,
    request: Request,
    live: TheLive,
    caller: Viewer,
    after: Annotated[
        str | None,
        Query(max_length=128, description="The same as the header Last-Event-ID, which counts where both are given."),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(max_length=128, description="Id of the last event that was seen: the stream goes on after it."),
    ] = None,
) -> EventStream:
    """News of a run as server-sent events, from now on or after an event that was seen.

    With an id, and told again from any id on, by any gateway: `step` {step, metrics}, `alert`, `evaluation` {step, metrics},
    `checkpoint` {step, bytes, created}, `change`, each as its list has them; `rewind` {step} when the run went back: what came
    after that step counts no more, and what follows comes after it; with step 0 everything is told anew, which is also what
    an id gets that is none of this run's any more. A checkpoint that was dropped before it could be told is not. Without an
    id, as they are now: `progress`, a `Progress`, at first and on every change, also once the run has ended; `services`
    {services}, at first and when the health of one changes.
    The very first event has an id, too: that of the place where the stream begins.
    """
    stopping: asyncio.Event = request.app.state.stopping
    feed, place = live.feeds.of(run), _place(last_event_id, after)
    if live.streams[caller.access] >= MAX_STREAMS:
        raise ProblemError(
            429, f"{MAX_STREAMS} event streams are open with this token; close some", headers={"retry-after": "10"}
        )
    return EventStream(feed.listen(place, stopping), caller.access, live.streams)


def _place(header: str | None, query: str | None) -> Place | None:
    for field, text in (("header.last-event-id", header), ("query.after", query)):
        if text is not None:
            try:
                return Place.parse(text)
            except ValueError as error:
                raise WrongField(field, str(error)) from None
    return None
