"""The session of a caller: what its token permits."""

from __future__ import annotations

from quartet import __version__
from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.routes.dependencies import TheSettings
from quartet.gateway.schemas import Access, Session

router = api_router("session")


@router.get("/session")
def get_session(caller: Viewer, settings: TheSettings) -> Session:
    """Return the access of the token, and what this gateway permits."""
    return Session(
        access=caller.access,
        version=__version__,
        run=settings.run,
        may_start_runs=settings.start_runs and caller.access is Access.OPERATOR,
    )
