"""The alerts of a run's guards, and its failed trajectories."""

from __future__ import annotations

from pydantic import TypeAdapter

from quartet.config.root import Config
from quartet.contract.control import Alert
from quartet.errors import ConfigError
from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.routes.dependencies import Cursor, Limit, RunName, TheCatalog, TheReaders, TheRunFiles
from quartet.gateway.schemas import FailedTrajectory, Guards, Page

router = api_router("guards")

MAX_ALERTS = 200
_ALERTS = TypeAdapter(list[Alert], config={"extra": "forbid"})


@router.get("/runs/{run}/guards")
def get_guards(_: Viewer, run: RunName, files: TheRunFiles, catalog: TheCatalog, readers: TheReaders) -> Guards:
    """Return the settings of the guards, and their alerts, newest first. A stage before RLHF has neither."""
    config = catalog.any_config(run)
    newest = readers.records(files.alerts)[: -MAX_ALERTS - 1 : -1]
    try:
        alerts = _ALERTS.validate_python(newest)
    except ValueError:
        raise ConfigError(f"{files.alerts}: not alerts in Quartet's format; repair the file, or remove it") from None
    settings = config.guards.model_dump(mode="json") if isinstance(config, Config) else {}
    return Guards(settings=settings, alerts=alerts)


@router.get("/runs/{run}/failed-trajectories")
def list_failed_trajectories(
    _: Viewer, files: TheRunFiles, readers: TheReaders, limit: Limit = 50, cursor: Cursor = None
) -> Page[FailedTrajectory]:
    """List the trajectories and evaluation responses that could not be scored, newest first."""
    request = ["failed-trajectories", files.root.name]
    records = readers.records(files.failed_trajectories)
    end = len(records)
    if cursor is not None:
        end = max(0, min(end, int(read_cursor(cursor, request, (int,))[0])))
    start = max(0, end - limit)
    names = FailedTrajectory.model_fields
    try:
        items = [
            FailedTrajectory.model_validate({name: record.get(name) for name in names})
            for record in records[start:end][::-1]
        ]
    except ValueError:
        raise ConfigError(
            f"{files.failed_trajectories}: not failed trajectories in Quartet's format; repair the file, or remove it"
        ) from None
    return Page(items=items, total=len(records), next=cursor_after([start], request) if start else None)
