"""The event stream of a run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from quartet.gateway.access.callers import Viewer
from quartet.gateway.events.event_cursor import EventCursor
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import ProblemError, WrongField
from quartet.gateway.routes.dependencies import RunName, TheEventStreams
from quartet.gateway.schemas import Access

router = api_router("live")

MAX_STREAMS = 128
"""Open event streams per token. The limit leaves connections for commands."""
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
"""Tell proxies to forward each event at once."""


class ServerSentEventsResponse(StreamingResponse):
    """A stream of encoded events. Each event is encoded once for all listeners, unlike with FastAPI's own class."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], access: Access, open_streams: Counter[Access]) -> None:
        super().__init__(events, headers=HEADERS)
        self._access, self._open_streams = access, open_streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; count it as open meanwhile."""
        self._open_streams[self._access] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._open_streams[self._access] -= 1


@router.get("/runs/{run}/events", response_class=ServerSentEventsResponse, status_code=200)
async def stream_events(
    run: RunName,
    request: Request,
    streams: TheEventStreams,
    caller: Viewer,
    after: Annotated[
        str | None,
        Query(max_length=128, description="Same as the header Last-Event-ID, which takes precedence."),
    ] = None,
    last_event_id: Annotated[
        str | None,
        Header(max_length=128, description="Id of the last received event. The stream continues after it."),
    ] = None,
) -> ServerSentEventsResponse:
    """Stream the events of a run as server-sent events, from now on or after a given event.

    Events with an id can be replayed from any id, by any gateway:

    - `step` {step, metrics}, `evaluation` {step, policy_version, metrics}, `alert`, `change`, `checkpoint` {step, bytes,
      created}: the same data as in the corresponding lists. A checkpoint that was deleted before it was sent is left out.
    - `rewind` {step}: the run was rolled back. All events after that step are invalid; the events that follow replace them. With
      step 0, the whole history is sent again. This also happens if the given id does not belong to the run's current history.

    Events without an id carry the current state:

    - `progress`, a `Progress`: at the start and after every change, also when the run has ended.
    - `services` {services}: at the start and when the health of a process changes.

    The first event always has an id, which marks the start of the stream.
    """
    stopping: asyncio.Event = request.app.state.stopping
    open_streams: Counter[Access] = request.app.state.open_streams
    stream, cursor = streams.of(run), _cursor(last_event_id, after)
    if open_streams[caller.access] >= MAX_STREAMS:
        raise ProblemError(
            429, f"{MAX_STREAMS} event streams are open with this token; close some", headers={"retry-after": "10"}
        )
    return ServerSentEventsResponse(stream.listen(cursor, stopping), caller.access, open_streams)


def _cursor(header: str | None, query: str | None) -> EventCursor | None:
    for field, text in (("header.last-event-id", header), ("query.after", query)):
        if text is not None:
            try:
                return EventCursor.parse(text)
            except ValueError as error:
                raise WrongField(field, str(error)) from None
    return None
