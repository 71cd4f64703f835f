"""What the guards found, and the trajectories that nobody could score."""

from __future__ import annotations

from quartet.errors import ConfigError
from quartet.gateway.access import Viewer
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.routing import Cursor, Limit, TheConfig, TheReading, TheRun, api_router
from quartet.gateway.schemas import AlertInfo, FailedTrajectory, Guards, Page

router = api_router("guards")

MAX_ALERTS = 200


@router.get("/runs/{run}/guards")
def get_guards(_: Viewer, files: TheRun, config: TheConfig, reading: TheReading) -> Guards:
    """The guards' settings, and what they found, the newest first."""
    newest = reading.records.of(files.alerts)[: -MAX_ALERTS - 1 : -1]
    try:
        alerts = [AlertInfo.model_validate(record) for record in newest]
    except ValueError:
        raise ConfigError(f"{files.alerts}: not alerts of Quartet's; mend the file, or remove it") from None
    return Guards(settings=config.guards.model_dump(mode="json"), alerts=alerts)


@router.get("/runs/{run}/set-aside")
def list_failed_trajectories(
    _: Viewer, files: TheRun, reading: TheReading, limit: Limit = 50, cursor: Cursor = None
) -> Page[FailedTrajectory]:
    """Trajectories that could not be scored, and evaluations that could not be judged, the newest first."""
    question = ["set-aside", files.root.name]
    records = reading.records.of(files.failed_trajectories)
    end = len(records)
    if cursor is not None:
        end = max(0, min(end, int(read_cursor(cursor, question, (int,))[0])))
    begin = max(0, end - limit)
    names = FailedTrajectory.model_fields
    try:
        items = [
            FailedTrajectory.model_validate({name: record.get(name) for name in names})
            for record in records[begin:end][::-1]
        ]
    except ValueError:
        raise ConfigError(
            f"{files.failed_trajectories}: not trajectories of Quartet's; mend the file, or remove it"
        ) from None
    return Page(items=items, total=len(records), next=cursor_after([begin], question) if begin else None)
