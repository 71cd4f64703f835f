"""The gateway's app: REST below ``/api/v1``, the dashboard at ``/``.

What the routes find on ``app.state``: ``settings``, ``runs`` (Runs), ``live`` (Live), ``reading`` (the caches over the runs'
files), and ``stopping``, an ``asyncio.Event`` that is set when the server is asked to end, for streams to end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from quartet import __version__
from quartet.gateway import routes
from quartet.gateway.access import AccessControl
from quartet.gateway.http_errors import AnswerUnforeseen, add_handlers
from quartet.gateway.monitors.run_monitor import Live
from quartet.gateway.readers import Reading
from quartet.gateway.request_metrics import CountRequests, GatewayMetrics
from quartet.gateway.routing import PREFIX
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import Problem
from quartet.gateway.settings import GatewaySettings

DESCRIPTION = """Everything that can be seen of RLHF runs, or done to them.

Every request carries `Authorization: Bearer TOKEN`. Errors are `application/problem+json`; lists come in pages; live news come
as server-sent events that can be taken up again at the last one seen."""


def create_app(settings: GatewaySettings) -> FastAPI:
    """A gateway over one folder of runs. It serves while its lifespan lasts."""
    runs = Runs(settings.runs)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.stopping = asyncio.Event()
        app.state.live = Live(runs, settings.run, settings.buffer_url, settings.credentials)
        try:
            yield
        finally:
            app.state.stopping.set()
            await run_in_threadpool(app.state.live.close)

    app = FastAPI(
        title="Quartet",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        # The pages that FastAPI makes of it load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings, app.state.runs, app.state.reading = settings, runs, Reading()
    app.state.figures = GatewayMetrics()
    add_handlers(app)
    for router in routes.ROUTERS:
        app.include_router(router)
    _document(app)
    # The last one added is the first that a request meets.
    app.add_middleware(AnswerUnforeseen)
    app.add_middleware(AccessControl, settings=settings)
    app.add_middleware(CountRequests, figures=app.state.figures)
    return app


def _document(app: FastAPI) -> None:
    """Lets the OpenAPI document say what is true of every path: the problems, and that a token is needed."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            parts = document.setdefault("components", {})
            schemas = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            parts.setdefault("schemas", {}).update(schemas.pop("$defs", {}))
            parts["schemas"]["Problem"] = schemas
            for unused in ("HTTPValidationError", "ValidationError"):
                parts["schemas"].pop(unused, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
