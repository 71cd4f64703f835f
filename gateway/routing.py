"""What every route of the API is made of: its router, the parameters that recur, what it finds on the app."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from quartet.config import Config
from quartet.gateway.http_errors import PROBLEM_RESPONSES
from quartet.gateway.monitors.run_monitor import Live
from quartet.gateway.readers import Reading
from quartet.gateway.runs.catalog import NAME_PATTERN, Runs
from quartet.gateway.settings import GatewaySettings
from quartet.run_directory.run_files import RunFiles

PREFIX = "/api/v1"

RunName = Annotated[str, Path(pattern=NAME_PATTERN, description="The run's name.")]
Limit = Annotated[int, Query(ge=1, le=500, description="Most items of a page.")]
Cursor = Annotated[
    str | None,
    Query(max_length=512, description="`next` of the page before; with the same filters and order as there."),
]
Step = Annotated[int, Path(ge=1, le=1_000_000_000, description="A committed step.")]


class StrictRoute(APIRoute):
    """Refuses query parameters that it does not know: a filter with a slip of the pen must not show everything."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Of FastAPI."""
        handle = super().get_route_handler()
        known = _query_names(self.dependant)

        async def strict(request: Request) -> Response:
            unknown = sorted(set(request.query_params) - known)
            if unknown:
                hint = f"known here: {', '.join(sorted(known))}" if known else "this path takes none"
                raise RequestValidationError(
                    [{"type": "unknown", "loc": ("query", name), "msg": f"unknown; {hint}"} for name in unknown]
                )
            return await handle(request)

        return strict


def api_router(tag: str) -> APIRouter:
    """A router below ``/api/v1``, its errors documented."""
    return APIRouter(prefix=PREFIX, tags=[tag], route_class=StrictRoute, responses=PROBLEM_RESPONSES)


def _query_names(dependant: Dependant) -> set[str]:
    """The query parameters of a route and of all that it depends on."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_query_names(below) for below in dependant.dependencies))


# These wait for nothing: as plain functions each of them would take its turn among the threads.
async def _settings(request: Request) -> GatewaySettings:
    found: GatewaySettings = request.app.state.settings
    return found


async def _runs(request: Request) -> Runs:
    found: Runs = request.app.state.runs
    return found


async def _live(request: Request) -> Live:
    found: Live = request.app.state.live
    return found


async def _reading(request: Request) -> Reading:
    found: Reading = request.app.state.reading
    return found


TheSettings = Annotated[GatewaySettings, Depends(_settings)]
TheRuns = Annotated[Runs, Depends(_runs)]
TheLive = Annotated[Live, Depends(_live)]
TheReading = Annotated[Reading, Depends(_reading)]


def _run_files(run: RunName, runs: TheRuns) -> RunFiles:
    return runs.find(run)


def _config(run: RunName, runs: TheRuns) -> Config:
    return runs.config(run)


TheRun = Annotated[RunFiles, Depends(_run_files)]
"""The files of the run that the path names; 404 where there is none."""
TheConfig = Annotated[Config, Depends(_config)]
"""The config of the run that the path names."""
