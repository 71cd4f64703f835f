"""The router class of the REST API. It refuses unknown query parameters."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from quartet.gateway.http.http_errors import PROBLEM_RESPONSES

PREFIX = "/api/v1"


class StrictRoute(APIRoute):
    """A route that refuses unknown query parameters, so that a misspelled filter does not match everything."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with the check in front."""
        handle = super().get_route_handler()
        known = _query_names(self.dependant)

        async def handle_strictly(request: Request) -> Response:
            unknown = sorted(set(request.query_params) - known)
            if unknown:
                hint = f"known parameters: {', '.join(sorted(known))}" if known else "this path takes none"
                raise RequestValidationError(
                    [{"type": "unknown", "loc": ("query", name), "msg": f"unknown; {hint}"} for name in unknown]
                )
            return await handle(request)

        return handle_strictly


def api_router(tag: str) -> APIRouter:
    """Return a router below ``/api/v1`` whose errors are documented."""
    return APIRouter(prefix=PREFIX, tags=[tag], route_class=StrictRoute, responses=PROBLEM_RESPONSES)


def _query_names(dependant: Dependant) -> set[str]:
    """Return the query parameters of a route and of its dependencies."""
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_query_names(dependency) for dependency in dependant.dependencies))
