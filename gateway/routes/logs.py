"""The logs of a run's processes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.readers.log_tail import last_lines, log_files
from quartet.gateway.routes.dependencies import TheRunFiles
from quartet.gateway.schemas import LogInfo, LogTail

router = api_router("logs")

MAX_LINES = 2000


@router.get("/runs/{run}/logs")
def list_logs(_: Viewer, files: TheRunFiles) -> list[LogInfo]:
    """List the logs of the run's processes by name."""
    logs = []
    for name, path in log_files(files.logs).items():
        try:
            logs.append(LogInfo(name=name, bytes=path.stat().st_size))
        except OSError:  # Removed meanwhile.
            continue
    return logs


@router.get("/runs/{run}/logs/{name}")
def get_log(
    _: Viewer,
    name: Annotated[
        str, Path(min_length=1, max_length=100, description="Name of the log: a process, such as `actor`.")
    ],
    files: TheRunFiles,
    lines: Annotated[int, Query(ge=1, le=MAX_LINES, description="Maximum number of lines, from the end.")] = 200,
) -> LogTail:
    """Return the last lines of one log."""
    known = log_files(files.logs)
    # Only listed files are opened: a name sent by a caller never becomes a path.
    path = known.get(name)
    if path is None:
        raise NotFound(f"log {name!r}: does not exist; this run has {', '.join(known) or 'no logs'}")
    try:
        tail, truncated = last_lines(path, lines)
    except OSError:
        raise NotFound(f"log {name!r}: cannot be read at the moment; try again") from None
    return LogTail(name=name, lines=tail, truncated=truncated)
