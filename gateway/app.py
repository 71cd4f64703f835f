"""The gateway's app: the REST API below ``/api/v1``, and the dashboard at ``/``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from quartet import __version__
from quartet.gateway import routes
from quartet.gateway.access.access_control import AccessControl
from quartet.gateway.commands.run_launcher import RunLauncher
from quartet.gateway.events.event_stream import EventStreams
from quartet.gateway.http.api_router import PREFIX
from quartet.gateway.http.http_errors import UnexpectedErrors, add_handlers
from quartet.gateway.http.request_metrics import GatewayMetrics, RequestMetrics
from quartet.gateway.monitors.buffer_monitor import BufferMonitor
from quartet.gateway.monitors.run_progress import RunMonitor
from quartet.gateway.monitors.service_monitor import ServiceMonitor
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.schemas import Access, Problem
from quartet.gateway.settings import GatewaySettings

DESCRIPTION = """Read the state of RLHF runs, and send commands to them.

Every request needs the header `Authorization: Bearer TOKEN`. Errors have the media type `application/problem+json`. Lists are
paginated. Live updates are server-sent events; a client resumes a stream with the id of the last event that it received."""


def create_app(settings: GatewaySettings) -> FastAPI:
    """Return the app of a gateway over one folder of runs.

    Routes use these objects on ``app.state`` (see ``routes/dependencies.py``): ``settings``, ``catalog``, ``readers``,
    ``metrics``, ``run_monitor``, ``service_monitor``, ``buffer_monitor``, ``event_streams``, ``run_launcher``,
    ``open_streams`` (number of event streams by access), and ``stopping``, an ``asyncio.Event`` that ends the event streams
    when the server shuts down.
    """
    catalog = RunCatalog(settings.runs, settings.credentials)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state = app.state
        state.stopping = asyncio.Event()
        state.run_monitor = RunMonitor(catalog)
        state.buffer_monitor = BufferMonitor(catalog, settings.run, settings.buffer_url)
        state.service_monitor = ServiceMonitor(catalog, state.buffer_monitor)
        state.event_streams = EventStreams(catalog, state.run_monitor.latest, state.service_monitor.services)
        state.run_launcher = RunLauncher(catalog)
        state.open_streams = Counter[Access]()
        try:
            yield
        finally:
            state.stopping.set()
            for part in (state.run_monitor, state.event_streams, state.service_monitor, state.buffer_monitor):
                await run_in_threadpool(part.close)

    app = FastAPI(
        title="Quartet",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        # FastAPI's documentation pages load scripts from other sites.
        docs_url=None,
        redoc_url=None,
    )
    app.state.settings, app.state.catalog, app.state.readers = settings, catalog, RunReaders()
    app.state.metrics = GatewayMetrics()
    add_handlers(app)
    for router in routes.ROUTERS:
        app.include_router(router)
    _document_problems(app)
    # The middleware added last handles a request first.
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(AccessControl, settings=settings)
    app.add_middleware(RequestMetrics, metrics=app.state.metrics)
    return app


def _document_problems(app: FastAPI) -> None:
    """Add the ``Problem`` schema, which every error response uses, to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            components = document.setdefault("components", {})
            schemas = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            components.setdefault("schemas", {}).update(schemas.pop("$defs", {}))
            components["schemas"]["Problem"] = schemas
            for unused in ("HTTPValidationError", "ValidationError"):
                components["schemas"].pop(unused, None)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
