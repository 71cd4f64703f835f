"""Health and Prometheus metrics of the gateway itself."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import StrictRoute

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/healthz")
def get_health() -> dict[str, str]:
    """Return that the gateway responds. Needs no token and reveals nothing else."""
    return {"status": "ok"}


@router.get("/metrics")
def get_gateway_metrics(_: Viewer, request: Request) -> Response:
    """Return the gateway's own metrics in the Prometheus text format."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
