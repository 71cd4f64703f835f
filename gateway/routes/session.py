"""Who the caller is, and how the gateway itself does."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quartet import __version__
from quartet.gateway.access import Viewer
from quartet.gateway.request_metrics import CONTENT_TYPE
from quartet.gateway.routing import StrictRoute, TheSettings, api_router
from quartet.gateway.schemas import Access, Session

router = APIRouter()
api = api_router("session")
outside = APIRouter(route_class=StrictRoute, include_in_schema=False)


@api.get("/session")
def get_session(caller: Viewer, settings: TheSettings) -> Session:
    """Whom the gateway takes the caller for, and what it may do."""
    return Session(
        access=caller.access,
        version=__version__,
        run=settings.run,
        may_start_runs=settings.start_runs and caller.access is Access.OPERATOR,
    )


@outside.get("/healthz")
def get_health() -> dict[str, str]:
    """Whether the gateway answers: open to everyone, and silent about all else."""
    return {"status": "ok"}


@outside.get("/metrics")
def get_figures(_: Viewer, request: Request) -> Response:
    """The gateway's own figures, as Prometheus reads them."""
    return Response(request.app.state.figures.text(), media_type=CONTENT_TYPE)


router.include_router(api)
router.include_router(outside)
