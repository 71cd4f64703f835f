"""The ends of the processes' logs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import NotFound
from quartet.gateway.readers.logs import last_lines, log_files
from quartet.gateway.routing import TheRun, api_router
from quartet.gateway.schemas import LogInfo, LogTail

router = api_router("logs")

MAX_LINES = 2000


@router.get("/runs/{run}/logs")
def list_logs(_: Viewer, files: TheRun) -> list[LogInfo]:
    """The logs of the run's processes, by name."""
    found = []
    for name, path in log_files(files.logs).items():
        try:
            found.append(LogInfo(name=name, bytes=path.stat().st_size))
        except OSError:  # Removed meanwhile.
            continue
    return found


@router.get("/runs/{run}/logs/{name}")
def get_log(
    _: Viewer,
    name: Annotated[str, Path(min_length=1, max_length=100, description="Of the log: a process, such as `actor`.")],
    files: TheRun,
    lines: Annotated[int, Query(ge=1, le=MAX_LINES, description="Most lines, from the end.")] = 200,
) -> LogTail:
    """The last lines of one log."""
    known = log_files(files.logs)
    # Only what the folder's list names is opened: no name that a caller makes up becomes a path.
    path = known.get(name)
    if path is None:
        raise NotFound(f"log {name!r}: there is none; this run has {', '.join(known) or 'no logs'}")
    try:
        found, truncated = last_lines(path, lines)
    except OSError:
        raise NotFound(f"log {name!r}: cannot be read just now; try again") from None
    return LogTail(name=name, lines=found, truncated=truncated)
