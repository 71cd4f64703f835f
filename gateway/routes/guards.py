"""What the guards found, and the trajectories that nobody could score."""

from __future__ import annotations

from gateway.access import Viewer
from gateway.models import AlertInfo, Guards, Page, SetAside
from gateway.paging import cursor_after, read_cursor
from gateway.routing import Cursor, Limit, TheConfig, TheReading, TheRun, api_router
from quartet.errors import ConfigError

router = api_router("guards")

MOST_ALERTS = 200


@router.get("/runs/{run}/guards")
def get_guards(_: Viewer, files: TheRun, config: TheConfig, reading: TheReading) -> Guards:
    """The guards' settings, and what they found, the newest first."""
    newest = reading.records.of(files.alerts)[: -MOST_ALERTS - 1 : -1]
    try:
        alerts = [AlertInfo.model_validate(record) for record in newest]
    except ValueError:
        raise ConfigError(f"{files.alerts}: not alerts of Quartet's; mend the file, or remove it") from None
    return Guards(settings=config.guards.model_dump(mode="json"), alerts=alerts)


@router.get("/runs/{run}/set-aside")
def list_set_aside(
    _: Viewer, files: TheRun, reading: TheReading, limit: Limit = 50, cursor: Cursor = None
) -> Page[SetAside]:
    """Trajectories that could not be scored, and evaluations that could not be judged, the newest first."""
    question = ["set-aside", files.root.name]
    records = reading.records.of(files.poison)
    end = len(records)
    if cursor is not None:
        end = max(0, min(end, int(read_cursor(cursor, question, (int,))[0])))
    begin = max(0, end - limit)
    names = SetAside.model_fields
    try:
        items = [
            SetAside.model_validate({name: record.get(name) for name in names}) for record in records[begin:end][::-1]
        ]
    except ValueError:
        raise ConfigError(f"{files.poison}: not trajectories of Quartet's; mend the file, or remove it") from None
    return Page(items=items, total=len(records), next=cursor_after([begin], question) if begin else None)
