"""What goes on now: the processes of a run and its buffer."""

from __future__ import annotations

from quartet.gateway.access import Viewer
from quartet.gateway.routing import RunName, TheLive, api_router
from quartet.gateway.schemas import Buffer, ServiceInfo

router = api_router("live")


@router.get("/runs/{run}/services")
def services(run: RunName, live: TheLive, _: Viewer) -> list[ServiceInfo]:
    """Every process of a live run, its health and its load; none unless it is live. At most a second old."""
    return live.services.look(run)


@router.get("/runs/{run}/buffer")
def buffer(run: RunName, live: TheLive, _: Viewer) -> Buffer:
    """What waits in the run's Redis."""
    return live.buffers.look(run)
