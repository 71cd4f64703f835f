"""The processes of an active run and its rollout buffer."""

from __future__ import annotations

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.routes.dependencies import RunName, TheBufferMonitor, TheServiceMonitor
from quartet.gateway.schemas import Buffer, ServiceInfo

router = api_router("live")


@router.get("/runs/{run}/services")
def list_services(run: RunName, monitor: TheServiceMonitor, _: Viewer) -> list[ServiceInfo]:
    """List the processes of a run with their health and load; empty if the run is not active. Polled at most once a second."""
    return monitor.services(run)


@router.get("/runs/{run}/buffer")
def get_buffer(run: RunName, monitor: TheBufferMonitor, _: Viewer) -> Buffer:
    """Return what the run's rollout buffer (Redis) contains."""
    return monitor.buffer(run)
