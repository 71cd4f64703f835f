"""Commands of operators: start a run, and control active runs. Each command that reaches a run is in its audit log."""

from __future__ import annotations

from quartet.contract.control import SettingChange
from quartet.gateway.access.callers import Operator, Viewer
from quartet.gateway.commands.audit_log import newest_first
from quartet.gateway.commands.run_commands import RunCommands
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import ProblemError
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.readers.jsonl_records import validated
from quartet.gateway.readers.run_readers import RunReaders
from quartet.gateway.routes.dependencies import (
    Cursor,
    Limit,
    RunName,
    TheReaders,
    TheRunCommands,
    TheRunFiles,
    TheRunLauncher,
    TheRunSummaries,
    TheSettings,
)
from quartet.gateway.schemas import (
    AuditEntry,
    CommandAccepted,
    Page,
    ProfileRequest,
    RollbackRequest,
    RunSummary,
    Settings,
    SettingValues,
    StartRunRequest,
    State,
)
from quartet.run_directory.run_files import RunFiles

router = api_router("commands")

MAX_CHANGES = 200
"""Newest changes of settings in a response."""


@router.post("/runs", status_code=201)
def start_run(
    caller: Operator,
    settings: TheSettings,
    launcher: TheRunLauncher,
    summaries: TheRunSummaries,
    body: StartRunRequest,
) -> RunSummary:
    """Start a run, or continue an existing one. Respond after its inputs are validated. A run outlives the gateway.

    If the checks take more than 20 seconds, the response is 504 and the start continues.
    """
    if not settings.start_runs:
        raise ProblemError(403, "this gateway may not start runs; set gateway.start_runs, or use quartet train CONFIG")
    config = launcher.start(body, caller.user)
    summary = summaries.summary(config.run.name)
    return summary if summary.live else summary.model_copy(update={"state": State.STARTING})


@router.post("/runs/{run}/pause", status_code=202)
def pause(caller: Operator, run: RunName, commands: TheRunCommands) -> CommandAccepted:
    """Pause the run after the current step."""
    problem = commands.send(run, caller.user, "Pause")
    return _accepted(f"run {run} pauses after the current step", problem)


@router.post("/runs/{run}/resume", status_code=202)
def resume(caller: Operator, run: RunName, commands: TheRunCommands) -> CommandAccepted:
    """Resume a paused run."""
    problem = commands.send(run, caller.user, "Resume")
    return _accepted(f"run {run} resumes", problem)


@router.post("/runs/{run}/stop", status_code=202)
def stop(caller: Operator, run: RunName, commands: TheRunCommands) -> CommandAccepted:
    """Stop the run after the current step and save its policy."""
    problem = commands.send(run, caller.user, "Stop")
    return _accepted(f"run {run} stops after the current step and saves its policy", problem)


@router.post("/runs/{run}/checkpoint", status_code=202)
def checkpoint(caller: Operator, run: RunName, commands: TheRunCommands) -> CommandAccepted:
    """Save a checkpoint after the current step, in addition to the scheduled ones."""
    problem = commands.send(run, caller.user, "Checkpoint")
    return _accepted(f"run {run} saves a checkpoint after the current step", problem)


@router.post("/runs/{run}/rollback", status_code=202)
def roll_back(caller: Operator, run: RunName, commands: TheRunCommands, body: RollbackRequest) -> CommandAccepted:
    """Restore the run from a checkpoint after the current step. Later steps are discarded."""
    problem = commands.roll_back(run, caller.user, body.step)
    return _accepted(f"run {run} is rolled back to step {body.step} after the current step, then continues", problem)


@router.post("/runs/{run}/profile", status_code=202)
def profile(caller: Operator, run: RunName, commands: TheRunCommands, body: ProfileRequest) -> CommandAccepted:
    """Profile the next steps of actor, critic and generators. The profile appears in the list of profiles once it is saved."""
    problem = commands.profile(run, caller.user, body.steps)
    steps = "step" if body.steps == 1 else f"{body.steps} steps"
    return _accepted(f"run {run} profiles the next {steps}", problem)


def _accepted(detail: str, audit_problem: str) -> CommandAccepted:
    return CommandAccepted(detail=f"{detail}; {audit_problem}" if audit_problem else detail)


@router.get("/runs/{run}/audit")
def list_commands(
    _: Viewer, run: RunName, files: TheRunFiles, readers: TheReaders, limit: Limit = 50, cursor: Cursor = None
) -> Page[AuditEntry]:
    """List the commands that were sent to the run, newest first, including refused ones."""
    records, request = readers.records(files.audit), ["audit", run]
    before = int(read_cursor(cursor, request, (int,))[0]) if cursor is not None else None
    items, next_before = newest_first(files.audit, records, before, limit)
    return Page(items=items, total=len(records), next=cursor_after([next_before], request) if next_before else None)


@router.get("/runs/{run}/settings")
def get_settings(
    _: Viewer, run: RunName, files: TheRunFiles, commands: TheRunCommands, readers: TheReaders
) -> Settings:
    """Return the settings that can be changed during training, their bounds, and past changes."""
    return _settings(run, files, commands, readers)


@router.patch("/runs/{run}/settings")
def change_settings(
    caller: Operator,
    run: RunName,
    files: TheRunFiles,
    commands: TheRunCommands,
    readers: TheReaders,
    body: SettingValues,
) -> Settings:
    """Change settings from the first step on that has not started. If one value is refused, none is changed."""
    commands.change_settings(run, caller.user, body)
    return _settings(run, files, commands, readers)


def _settings(run: str, files: RunFiles, commands: RunCommands, readers: RunReaders) -> Settings:
    records = readers.records(files.changes)
    first = max(0, len(records) - MAX_CHANGES)
    changes = validated(SettingChange, files.changes, records[first:], first + 1)
    return Settings(settings=commands.settings(run), changes=changes)
