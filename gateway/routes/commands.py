"""What operators may do: command live runs, and start one. What gets as far as a run is in its audit, also if refused there."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from quartet.gateway.access import Operator, Viewer
from quartet.gateway.audit import newest_first
from quartet.gateway.http_errors import ProblemError
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.readers import Reading
from quartet.gateway.readers.jsonl_records import shaped
from quartet.gateway.routes.runs import TheSummaries
from quartet.gateway.routing import (
    Cursor,
    Limit,
    RunName,
    TheLive,
    TheReading,
    TheRun,
    TheRuns,
    TheSettings,
    api_router,
)
from quartet.gateway.runs.run_commands import Commands
from quartet.gateway.schemas import (
    Accepted,
    AuditEntry,
    Change,
    ChangeSettings,
    Page,
    RollBack,
    RunSummary,
    Settings,
    StartRun,
    State,
)
from quartet.run_directory.run_files import RunFiles

router = api_router("commands")

MAX_CHANGES = 200
"""Newest changes of settings that are told."""


def _commands(runs: TheRuns, live: TheLive) -> Commands:
    return Commands(runs, live)


TheCommands = Annotated[Commands, Depends(_commands)]


@router.post("/runs", status_code=201)
def start_run(
    caller: Operator, settings: TheSettings, live: TheLive, summaries: TheSummaries, wanted: StartRun
) -> RunSummary:
    """Starts a run, or goes on with one; it outlives the gateway. Answers when its inputs have been looked at."""
    if not settings.start_runs:
        raise ProblemError(403, "this gateway starts no runs; set gateway.start_runs, or use quartet train CONFIG")
    config = live.starter.start(wanted, caller.who)
    summary = summaries.summary(config.run.name)
    return summary if summary.live else summary.model_copy(update={"state": State.STARTING})


@router.post("/runs/{run}/pause", status_code=202)
def pause(caller: Operator, run: RunName, commands: TheCommands) -> Accepted:
    """The run waits after the step in hand."""
    unnoted = commands.pause(run, caller.who)
    return _accepted(f"run {run} pauses after the step in hand", unnoted)


@router.post("/runs/{run}/resume", status_code=202)
def resume(caller: Operator, run: RunName, commands: TheCommands) -> Accepted:
    """A paused run goes on."""
    unnoted = commands.resume(run, caller.who)
    return _accepted(f"run {run} goes on", unnoted)


@router.post("/runs/{run}/stop", status_code=202)
def stop(caller: Operator, run: RunName, commands: TheCommands) -> Accepted:
    """The run ends after the step in hand; its policy is saved."""
    unnoted = commands.stop(run, caller.who)
    return _accepted(f"run {run} stops after the step in hand and saves its policy", unnoted)


@router.post("/runs/{run}/checkpoint", status_code=202)
def checkpoint(caller: Operator, run: RunName, commands: TheCommands) -> Accepted:
    """A checkpoint is saved after the step in hand, beside those that are due anyway."""
    unnoted = commands.checkpoint(run, caller.who)
    return _accepted(f"run {run} saves a checkpoint after the step in hand", unnoted)


@router.post("/runs/{run}/rollback", status_code=202)
def roll_back(caller: Operator, run: RunName, commands: TheCommands, wanted: RollBack) -> Accepted:
    """The run goes back to a checkpoint after the step in hand; what came after it is forgotten."""
    unnoted = commands.roll_back(run, caller.who, wanted.step)
    return _accepted(f"run {run} goes back to step {wanted.step} after the step in hand, and on from there", unnoted)


def _accepted(detail: str, unnoted: str) -> Accepted:
    return Accepted(detail=f"{detail}; {unnoted}" if unnoted else detail)


@router.get("/runs/{run}/audit")
def list_commands(
    _: Viewer, run: RunName, files: TheRun, reading: TheReading, limit: Limit = 50, cursor: Cursor = None
) -> Page[AuditEntry]:
    """The commands that were given to the run, the newest first, those that were refused among them."""
    records, question = reading.records.of(files.audit), ["audit", run]
    before = int(read_cursor(cursor, question, (int,))[0]) if cursor is not None else None
    items, rest = newest_first(files.audit, records, before, limit)
    return Page(items=items, total=len(records), next=cursor_after([rest], question) if rest else None)


@router.get("/runs/{run}/settings")
def get_settings(_: Viewer, run: RunName, files: TheRun, commands: TheCommands, reading: TheReading) -> Settings:
    """What can be changed while the run goes on, within which bounds, and what was changed."""
    return _settings(run, files, commands, reading)


@router.patch("/runs/{run}/settings")
def change_settings(
    caller: Operator, run: RunName, files: TheRun, commands: TheCommands, reading: TheReading, wanted: ChangeSettings
) -> Settings:
    """Changes settings from the first step on that has not begun: all that are given or, where one is refused, none."""
    commands.change(run, caller.who, wanted)
    return _settings(run, files, commands, reading)


def _settings(run: str, files: RunFiles, commands: Commands, reading: Reading) -> Settings:
    records = reading.records.of(files.changes)
    first = max(0, len(records) - MAX_CHANGES)
    changes = shaped(Change, files.changes, records[first:], first + 1)
    return Settings(settings=commands.settings(run), changes=changes)
