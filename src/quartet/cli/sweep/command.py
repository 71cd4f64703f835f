"""`quartet sweep`: check all configs, train the runs, print the table."""

from __future__ import annotations

import datetime
import difflib
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from quartet.buffer.redis_url import BUFFER_URL_VARIABLE, environment_overrides
from quartet.cli.console import make_console
from quartet.config.root import Config
from quartet.config.section import NAME_PATTERN
from quartet.config.url_redaction import is_redacted, redact_url
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.launcher.sweep.definition import Definition, SweepFiles, check_usable, lock_sweep
from quartet.launcher.sweep.grid import Grid, PlannedRun, describe, load_setting, parse_grid, plan_runs, short_keys
from quartet.launcher.sweep.jobs import run_jobs, slot_environments
from quartet.launcher.sweep.results import (
    STOPPED,
    Direction,
    Estimate,
    SettingResult,
    as_csv,
    as_json,
    columns,
    is_finished,
    run_result,
    setting_results,
)
from quartet.preflight import problems
from quartet.preflight.findings import raise_errors
from quartet.run_directory.locking_and_removal import is_used
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import module_command, tied_to_parent
from quartet.system.durable_files import storage_errors, write_durably
from quartet.telemetry.step_metrics import METRICS, definition_of

STATUS_SECONDS = 5.0
"""Interval of the status line in a terminal."""
MAX_ERROR = 500
"""Maximum number of characters of a run's error in the table."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of the command. ``metric`` None: the reward, if the runs have one."""

    target: Path
    overrides: list[str]
    seeds: str | None
    jobs: int | None
    name: str | None
    table: bool
    metric: str | None
    direction: Direction
    table_format: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep whose runs all have a valid config."""

    files: SweepFiles
    config: Path
    definition: Definition
    runs: list[PlannedRun]
    is_new: bool


def run_sweep(request: Request) -> None:
    """Train all runs that have not finished, then write and print the table. Raises ServiceFailed if runs failed."""
    sweep = _open(request)
    metric = _metric(request, sweep.runs)
    if request.table:
        if sweep.is_new:
            raise ConfigError(f"--table: {sweep.files.root} has no sweep yet; start it without --table")
        _print_table(sweep, metric, request)
        return
    console = make_console(stderr=request.table_format != "text")
    execution = _Execution(sweep, console)
    execution.check()
    with lock_sweep(sweep.files):
        execution.run()
        results = _print_table(sweep, metric, request, write=True)
    failed = sum(result.count("failed") for result in results)
    if failed:
        raise ServiceFailed(
            f"sweep {sweep.files.root}: {failed} of {len(sweep.runs)} runs failed; see {sweep.files.logs}; to retry them: "
            f"{_continuation(sweep)}"
        )


def _open(request: Request) -> Sweep:
    """Return the sweep with the arguments, or the one in a folder. Raises ConfigError."""
    if request.target.is_dir():
        given = {"--set": request.overrides, "--seeds": request.seeds, "--name": request.name}
        if wrong := next((option for option, value in given.items() if value), None):
            raise ConfigError(f"{wrong}: {request.target} is the folder of a sweep, which has its own; remove {wrong}")
        files = SweepFiles(request.target)
        before = Definition.read(files)
        if before is None:
            raise ConfigError(
                f"sweep {files.root}: has no sweep.json; expected a config file, or the folder of a sweep"
            )
        config, grid = files.config, before.grid
    else:
        grid = parse_grid(request.overrides, request.seeds)
        config = request.target
        files = SweepFiles(_folder(config, grid, request.name))
        before = Definition.read(files)
    runs = plan_runs(config, grid, files.root, environment_overrides())
    jobs = request.jobs or (before.jobs if before is not None else 1)
    definition = Definition.new(grid, jobs, runs[0].config)
    if before is not None:
        before.check(definition, files.root)
    else:
        check_usable(files)
    return Sweep(files, config, definition, runs, before is None)


def _folder(config: Path, grid: Grid, name: str | None) -> Path:
    first = load_setting(config, grid, grid.settings()[0], environment_overrides())
    chosen = name if name is not None else f"{first.run.name}-sweep"
    if not re.fullmatch(NAME_PATTERN[:-1], chosen):
        raise ConfigError(
            f"--name {chosen}: expected 1 to 64 letters, digits, '.', '_' and '-', first a letter or digit"
        )
    return first.run.directory / chosen


def _metric(request: Request, runs: Sequence[PlannedRun]) -> str | None:
    """Return the metric by which settings are compared. Raises ConfigError if there is no such metric."""
    metric = request.metric
    if metric is None:
        return "reward_mean" if runs[0].config.has_scores else None
    if definition_of(metric) is None:
        close = difflib.get_close_matches(metric, list(METRICS), n=1)
        hint = f"did you mean {close[0]}?" if close else "docs/reference/metrics.md lists the metrics"
        raise ConfigError(f"--metric {metric}: unknown metric; {hint}")
    if metric.startswith("eval_") and not runs[0].config.evaluation.every_steps:
        raise ConfigError(
            f"--metric {metric}: the runs are not evaluated; set evaluation.every_steps, and data.validation or evaluation.sets"
        )
    return metric


class _Execution:
    """The processes of a sweep's open runs."""

    def __init__(self, sweep: Sweep, console: Console) -> None:
        self._sweep, self._files, self._console = sweep, sweep.files, console
        self._started: dict[str, float] = {}
        self._log_ends: dict[str, int] = {}
        self._shown = 0.0
        self._status: Status | None = None
        self._slots: list[dict[str, str]] = []

    def check(self) -> None:
        """Check the inputs of all settings whose runs have not finished. Raises the error of the first that is wrong."""
        open_runs = self._open_runs()
        if open_runs:
            _check_password(open_runs[0].config)
            self._slots = slot_environments([run.config for run in open_runs], self._sweep.definition.jobs, os.environ)
            self._check_inputs(open_runs)

    def run(self) -> None:
        """Train the runs that have not finished."""
        sweep, open_runs, jobs = self._sweep, self._open_runs(), self._sweep.definition.jobs
        if not open_runs:
            self._print(f"{self._files.root}: all {len(sweep.runs)} runs are finished")
            return
        sweep.definition.write(self._files, sweep.config)
        self._files.logs.mkdir(exist_ok=True)
        done = len(sweep.runs) - len(open_runs)
        self._print(
            f"{self._files.root}: {len(sweep.runs)} runs, {done} finished, {jobs} at once; "
            f"dashboard: quartet view {quote(str(self._files.root))}"
        )
        try:
            with self._console.status("") if self._console.is_terminal else nullcontext() as self._status:
                run_jobs(open_runs, jobs, self._start, self._ended, self._show)
        except KeyboardInterrupt:
            self._print(f"to continue: {_continuation(sweep)}")
            raise

    def _open_runs(self) -> list[PlannedRun]:
        return [run for run in self._sweep.runs if not is_finished(run)]

    def _check_inputs(self, runs: Sequence[PlannedRun]) -> None:
        settings = {tuple(run.setting.items()): run for run in reversed(runs)}
        notes: dict[str, None] = {}
        for run in reversed(settings.values()):
            found = problems(run.config, report=self._print)
            try:
                raise_errors(found)
            except QuartetError as error:
                if not run.setting:
                    raise
                raise type(error)(f"{error}\n  in the setting {describe(run.setting)} of the sweep") from error
            notes |= dict.fromkeys(str(finding) for finding in found if finding.level == "warning")
        for note in notes:
            self._print(note)

    def _start(self, run: PlannedRun, slot: int) -> subprocess.Popen[bytes]:
        files, config = RunFiles(run.config.run_directory), self._files.run_config(run.name)
        write_durably(config, run.config.to_yaml())
        resume = is_used(files)
        options = ["--resume"] if resume else []
        with open(self._files.run_log(run.name), "ab", opener=_private) as log:
            self._log_ends[run.name] = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                tied_to_parent(module_command("quartet.cli.main", "train", str(config), *options)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._slots[slot], **_buffer_variable(run.config)},
                # Ctrl-C in the terminal reaches this process only, which then ends the runs.
                start_new_session=True,
            )
        self._started[run.name] = time.monotonic()
        self._print(f"{run.name}: {f'resumed at step {files.last_step()}' if resume else 'started'}")
        return process

    def _ended(self, run: PlannedRun, code: int) -> None:
        seconds = round(time.monotonic() - self._started[run.name])
        if is_finished(run):
            outcome, text = None, f"finished in {datetime.timedelta(seconds=seconds)}"
        elif code == 0:
            outcome, text = STOPPED, "stopped before its last step"
        else:
            outcome = self._error(run, code)
            text = f"failed: {outcome}"
        self._files.write_outcome(run.name, outcome)
        self._print(f"{run.name}: {text}")

    def _error(self, run: PlannedRun, code: int) -> str:
        """Return the error that `quartet train` printed last, or its exit status."""
        with self._files.run_log(run.name).open("rb") as log:
            log.seek(self._log_ends[run.name])
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors[-1] if errors else f"exit status {code}")[:MAX_ERROR]

    def _show(self, active: Sequence[PlannedRun]) -> None:
        if self._status is None or time.monotonic() - self._shown < STATUS_SECONDS:
            return
        self._shown = time.monotonic()
        steps = (
            f"{run.name} {RunFiles(run.config.run_directory).last_step()}/{run.config.run.steps}" for run in active
        )
        self._status.update(", ".join(steps))

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def _check_password(config: Config) -> None:
    """Raise ConfigError if the password in buffer.url is missing."""
    url = config.buffer.url
    if url is not None and is_redacted(url):
        raise ConfigError(
            f"buffer.url {url}: the stars replace a password, which the folder of a sweep does not contain; give the complete "
            f"URL in the environment variable {BUFFER_URL_VARIABLE}, or repeat the command that started the sweep"
        )


def _buffer_variable(config: Config) -> dict[str, str]:
    """Return the variable with the URL of the buffer: the config file of a run does not contain its password."""
    return {} if config.buffer.url is None else {BUFFER_URL_VARIABLE: config.buffer.url}


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read: the output of a run has the link with the token of its gateway."""
    return os.open(path, flags, 0o600)


def _continuation(sweep: Sweep) -> str:
    command = f"quartet sweep {quote(str(sweep.files.root))}"
    url = redact_url(sweep.runs[0].config.buffer.url or "")
    return f"{command}, with {BUFFER_URL_VARIABLE} set to {url} with its password" if is_redacted(url) else command


def _print_table(sweep: Sweep, metric: str | None, request: Request, write: bool = False) -> list[SettingResult]:
    outcomes = sweep.files.read_outcomes()
    results = setting_results(
        [run_result(run, outcomes.get(run.name)) for run in sweep.runs], metric, request.direction
    )
    csv, json = as_csv(results, metric), as_json(results, metric, request.direction)
    if write:
        for path, text in ((sweep.files.table_csv, csv), (sweep.files.table_json, json)):
            with storage_errors(path):
                write_durably(path, text)
    if request.table_format != "text":
        typer.echo({"csv": csv, "json": json}[request.table_format], nl=False)
        return results
    console = make_console(file_width=WIDTH)
    console.print(make_table(results, metric))
    if note := best_note(results, metric):
        console.print(note, soft_wrap=True)
    for line in error_lines(results):
        console.print(line, soft_wrap=True)
    if write:
        console.print(f"table: {sweep.files.table_csv} {sweep.files.table_json}", soft_wrap=True)
    return results


MAX_SHOWN_ERRORS = 20
WIDTH = 160
"""Columns of the table if the output is not a terminal."""
SHOWN = ("reward_mean", "kl_mean", "eval_reward_sampled", "eval_reward_greedy", "eval_judge_win_rate")
"""Metrics in the table for people. The files have all."""


def make_table(results: Sequence[SettingResult], metric: str | None) -> Table:
    """Return one row for each setting: its values, its runs, and mean ± half width of the 95 % interval of metrics."""
    names = [name for name in columns(results, metric) if name in SHOWN or name == metric]
    labels = short_keys(list(results[0].setting)) if results else {}
    table = Table(box=None, pad_edge=False)
    for label in labels.values():
        table.add_column(label)
    for title in ("finished", "failed", *(name if name.startswith("eval_") else _title(name) for name in names)):
        table.add_column(title, justify="right")
    table.add_column("")
    for result in results:
        failed = str(result.count("failed") or "")
        finished = f"{result.count('finished')} of {len(result.runs)}"
        numbers = (_text(result.metrics.get(name)) for name in names)
        table.add_row(*result.setting.values(), finished, failed, *numbers, "best" if result.best else "")
    return table


def _title(name: str) -> str:
    definition = definition_of(name)
    return (definition and definition.label) or name


def _text(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    width = "" if estimate.half_width is None else f" ± {estimate.half_width:.2g}"
    return f"{estimate.mean:.4g}{width}"


def best_note(results: Sequence[SettingResult], metric: str | None) -> str | None:
    """Return which settings cannot be the best, or else how certain the best one is. None if there is nothing to say."""
    incomplete = sum(not result.is_complete for result in results)
    if metric is None:
        return None
    if incomplete:
        return f"{incomplete} of {len(results)} settings cannot be the best yet: not all of their runs have finished"
    best = next((result for result in results if result.best), None)
    if best is None or len(results) == 1:
        return None
    leading = best.metrics[metric]
    if leading.half_width is None:
        return "one run per setting gives no interval, so chance may decide which is best; --seeds 3 runs three of each"
    others = [result.metrics[metric] for result in results if not result.best and metric in result.metrics]
    overlapping = sum(
        abs(other.mean - leading.mean) <= leading.half_width + (other.half_width or 0) for other in others
    )
    return f"settings whose interval overlaps with that of the best: {overlapping}" if overlapping else None


def error_lines(results: Sequence[SettingResult]) -> Iterator[str]:
    """Yield a line for each run that has not finished, up to a limit."""
    open_runs = [
        each for result in results for each in result.runs if each.state in ("failed", "stopped", "unfinished")
    ]
    for each in open_runs[:MAX_SHOWN_ERRORS]:
        error = f": {each.error}" if each.error else ""
        yield f"{each.run.name}: {each.state} at step {each.step} of {each.run.config.run.steps}{error}"
    if len(open_runs) > MAX_SHOWN_ERRORS:
        yield f"... and {len(open_runs) - MAX_SHOWN_ERRORS} more"
