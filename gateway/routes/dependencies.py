"""Dependencies of routes: common parameters, and the gateway's state on ``app.state``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request

from quartet.gateway.commands.run_commands import RunCommands
from quartet.gateway.commands.run_launcher import RunLauncher
from quartet.gateway.events.event_stream import EventStreams
from quartet.gateway.monitors.buffer_monitor import BufferMonitor
from quartet.gateway.monitors.run_progress import RunMonitor
from quartet.gateway.monitors.run_summaries import RunSummaries
from quartet.gateway.monitors.service_monitor import ServiceMonitor
from quartet.gateway.readers.run_catalog import NAME_PATTERN, RunCatalog
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.settings import GatewaySettings
from quartet.run_directory.run_files import RunFiles

RunName = Annotated[str, Path(pattern=NAME_PATTERN, description="Name of the run.")]
Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of items on the page.")]
Cursor = Annotated[
    str | None,
    Query(max_length=512, description="`next` of the previous page. Use the same filters and order as for that page."),
]
Step = Annotated[int, Path(ge=1, le=1_000_000_000, description="Number of a committed step.")]


def _of_state(name: str) -> Any:
    """Return a dependency on an object of ``app.state``."""

    # It does not block. As `async def` it runs directly instead of in the thread pool.
    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


TheSettings = Annotated[GatewaySettings, _of_state("settings")]
TheCatalog = Annotated[RunCatalog, _of_state("catalog")]
TheReaders = Annotated[RunReaders, _of_state("readers")]
TheRunMonitor = Annotated[RunMonitor, _of_state("run_monitor")]
TheServiceMonitor = Annotated[ServiceMonitor, _of_state("service_monitor")]
TheBufferMonitor = Annotated[BufferMonitor, _of_state("buffer_monitor")]
TheEventStreams = Annotated[EventStreams, _of_state("event_streams")]
TheRunLauncher = Annotated[RunLauncher, _of_state("run_launcher")]


async def _run_commands(catalog: TheCatalog, monitor: TheRunMonitor) -> RunCommands:
    return RunCommands(catalog, monitor)


async def _run_summaries(catalog: TheCatalog, readers: TheReaders, monitor: TheRunMonitor) -> RunSummaries:
    return RunSummaries(catalog, readers, monitor)


TheRunCommands = Annotated[RunCommands, Depends(_run_commands)]
TheRunSummaries = Annotated[RunSummaries, Depends(_run_summaries)]


def _run_files(run: RunName, catalog: TheCatalog) -> RunFiles:
    return catalog.find(run)


TheRunFiles = Annotated[RunFiles, Depends(_run_files)]
"""The files of the run named in the path. Answers 404 if there is no such run."""
