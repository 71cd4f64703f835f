"""The stream of live news."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.responses import StreamingResponse

from gateway.access import Viewer
from gateway.problems import WrongField
from gateway.routing import RunName, TheLive, api_router
from gateway.tail import Place

router = api_router("live")

HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""For proxies: each event is to be passed on when it comes."""


class EventStream(StreamingResponse):
    """Events as bytes: each is made once for all who listen, which FastAPI's own class would do anew for each."""

    media_type = "text/event-stream"


@router.get("/runs/{run}/events", response_class=EventStream)
async def events(
    run: RunName,
    request: Request,
    live: TheLive,
    _: Viewer,
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
    after that step counts no more, and what follows comes after it. Without an id, as they are now: `progress`, a `Progress`, at
    first and on every change, also once the run has ended; `services` {services}, at first and when the health of one changes.
    The very first event has an id, too: that of the place where the stream begins.
    """
    stopping: asyncio.Event = request.app.state.stopping
    feed = live.feeds.of(run)
    return EventStream(feed.listen(_place(last_event_id, after), stopping), headers=HEADERS)


def _place(header: str | None, query: str | None) -> Place | None:
    for field, text in (("header.last-event-id", header), ("query.after", query)):
        if text is not None:
            try:
                return Place.parse(text)
            except ValueError as error:
                raise WrongField(field, str(error)) from None
    return None
