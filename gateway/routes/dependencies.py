"""Dependencies of routes: common parameters, and the gateway's state on ``app.state``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request

from quartet.config.root import Config
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


# These functions do not block. As `async def` they run directly instead of in the thread pool.
async def _settings(request: Request) -> GatewaySettings:
    settings: GatewaySettings = request.app.state.settings
    return settings


async def _catalog(request: Request) -> RunCatalog:
    catalog: RunCatalog = request.app.state.catalog
    return catalog


async def _readers(request: Request) -> RunReaders:
    readers: RunReaders = request.app.state.readers
    return readers


async def _run_monitor(request: Request) -> RunMonitor:
    monitor: RunMonitor = request.app.state.run_monitor
    return monitor


async def _service_monitor(request: Request) -> ServiceMonitor:
    monitor: ServiceMonitor = request.app.state.service_monitor
    return monitor


async def _buffer_monitor(request: Request) -> BufferMonitor:
    monitor: BufferMonitor = request.app.state.buffer_monitor
    return monitor


async def _event_streams(request: Request) -> EventStreams:
    streams: EventStreams = request.app.state.event_streams
    return streams


async def _run_launcher(request: Request) -> RunLauncher:
    launcher: RunLauncher = request.app.state.run_launcher
    return launcher


TheSettings = Annotated[GatewaySettings, Depends(_settings)]
TheCatalog = Annotated[RunCatalog, Depends(_catalog)]
TheReaders = Annotated[RunReaders, Depends(_readers)]
TheRunMonitor = Annotated[RunMonitor, Depends(_run_monitor)]
TheServiceMonitor = Annotated[ServiceMonitor, Depends(_service_monitor)]
TheBufferMonitor = Annotated[BufferMonitor, Depends(_buffer_monitor)]
TheEventStreams = Annotated[EventStreams, Depends(_event_streams)]
TheRunLauncher = Annotated[RunLauncher, Depends(_run_launcher)]


async def _run_commands(catalog: TheCatalog, monitor: TheRunMonitor) -> RunCommands:
    return RunCommands(catalog, monitor)


async def _run_summaries(catalog: TheCatalog, readers: TheReaders, monitor: TheRunMonitor) -> RunSummaries:
    return RunSummaries(catalog, readers, monitor)


TheRunCommands = Annotated[RunCommands, Depends(_run_commands)]
TheRunSummaries = Annotated[RunSummaries, Depends(_run_summaries)]


def _run_files(run: RunName, catalog: TheCatalog) -> RunFiles:
    return catalog.find(run)


def _run_config(run: RunName, catalog: TheCatalog) -> Config:
    return catalog.config(run)


TheRunFiles = Annotated[RunFiles, Depends(_run_files)]
"""The files of the run named in the path. Answers 404 if there is no such run."""
TheRunConfig = Annotated[Config, Depends(_run_config)]
"""The config of the run named in the path. Answers 404 if there is no such run."""
