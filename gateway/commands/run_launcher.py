"""Runs that operators start over the API. Each is a separate `quartet train` process, which outlives the gateway."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import structlog
import yaml

from quartet.config.loading import invalid_keys, parse_config
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.gateway.commands.audit_log import audited, printable
from quartet.gateway.http.http_errors import ProblemError
from quartet.gateway.readers.run_catalog import RunCatalog
from quartet.gateway.schemas import FieldProblem, StartRunRequest
from quartet.run_directory.locking_and_removal import check_unused, lock_run_directory, remove_run
from quartet.run_directory.run_files import RunFiles
from quartet.system.child_processes import module_command
from quartet.system.durable_files import write_durably

log = structlog.get_logger()

MAX_RUNS = 8
"""Active runs that were started by this gateway."""
START_TIMEOUT_SECONDS = 20.0
"""Time to wait until a run has validated its inputs. It usually takes two seconds."""
POLL_SECONDS = 0.05
"""Interval between two checks of a starting run."""
LOG_NAME = "quartet.log"
_PRIVATE_VARIABLES = ("QUARTET_GATEWAY_TOKEN", "QUARTET_GATEWAY_VIEWER_TOKEN", "QUARTET_BUFFER_URL")
"""Environment variables of the gateway's own run. Another run must not inherit them."""


class RunLauncher:
    """Launcher of runs in one folder. Thread-safe."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, request: StartRunRequest, user: str) -> Config:
        """Start a run if its config and inputs are valid. Raises ProblemError with the invalid fields otherwise."""
        tree = self._with_gateway_settings(request.config)
        run = tree.get("run")
        name = run.get("name") if isinstance(run, dict) else None
        # A refusal is recorded in the run's audit log. An invalid name has no run folder.
        problems = invalid_keys(tree)
        files = RunFiles(self._catalog.folder / (name if isinstance(name, str) and not problems else "-"))
        details = {"name": name if isinstance(name, str) else None, "resume": request.resume}
        with audited(files, user, "start", details):
            if problems:
                raise _invalid_fields(problems)
            config = parse_config(tree, "of the request")
            self._launch(config, tree, RunFiles(config.run_directory), request.resume)
        return config

    def processes(self) -> dict[str, subprocess.Popen[bytes]]:
        """Return the processes of active runs that were started here, by name of the run."""
        return {name: process for name, process in self._processes.copy().items() if process.poll() is None}

    def _with_gateway_settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the config with this gateway's run folder, and with its own gateway disabled."""
        tree = dict(given)
        run, gateway = tree.get("run", {}), tree.get("gateway", {})
        if isinstance(run, dict):
            tree["run"] = {**run, "directory": str(self._catalog.folder)}
            if "name" not in run:
                raise ProblemError(
                    422,
                    "body.config.run.name: missing; choose a name for the run",
                    [FieldProblem(field="body.config.run.name", problem="missing; choose a name for the run")],
                )
        if isinstance(gateway, dict):
            tree["gateway"] = {**gateway, "enabled": False}
        return tree

    def _launch(self, config: Config, tree: dict[str, Any], files: RunFiles, resume: bool) -> None:
        name = config.run.name
        with self._lock:
            self._processes = self.processes()
            if name in self._processes:
                raise ProblemError(
                    409, f"run {name!r}: is already active; wait until it ends, or choose another run.name"
                )
            if len(self._processes) >= MAX_RUNS:
                raise ProblemError(
                    409, f"{MAX_RUNS} runs that were started here are active; wait until one ends, or stop one"
                )
            _prepare_directory(files, resume)
            written_before = _write_identity(files.config)
            output = files.logs / LOG_NAME
            log_size = output.stat().st_size if output.exists() else 0
            process = _train(tree, output, resume)
            self._processes[name] = process
        threading.Thread(target=process.wait, name=f"run {name}", daemon=True).start()
        _wait_until_started(process, files, written_before, log_size)


def _prepare_directory(files: RunFiles, resume: bool) -> None:
    """Prepare the run directory. Raises ProblemError if the name is in use, or if there is no run to resume."""
    if resume and not files.is_run():
        raise ProblemError(409, f"run {files.root.name!r}: there is no run to resume; set resume to false to start one")
    try:
        with lock_run_directory(files):
            if not resume:
                check_unused(files)
                # Clear the directory before the new log is created in it.
                _clear(files)
            files.logs.mkdir(exist_ok=True)
    except ConfigError as error:
        raise ProblemError(409, str(error)) from None


def _clear(files: RunFiles) -> None:
    """Remove a run without steps, except its audit log, which continues with the new run of the same name."""
    audit = files.audit.read_bytes() if files.audit.is_file() else None
    remove_run(files)
    if audit is not None:
        write_durably(files.audit, audit.decode(errors="replace"))


def _train(tree: dict[str, Any], output: Path, resume: bool) -> subprocess.Popen[bytes]:
    # The config goes through a pipe: it may contain a password, which must not be in a file.
    command = module_command("quartet.cli.main", "train", "/dev/stdin", *(["--resume"] if resume else []))
    environment = {name: value for name, value in os.environ.items() if name not in _PRIVATE_VARIABLES}
    with output.open("ab") as log_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=environment,
            # A new session: neither the gateway's end nor Ctrl-C in its terminal stops the run.
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(yaml.safe_dump(tree, allow_unicode=True).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # The process has ended already; its log says why.
    return process


def _wait_until_started(
    process: subprocess.Popen[bytes], files: RunFiles, written_before: tuple[int, int] | None, log_size: int
) -> None:
    """Wait until the run has validated its inputs and written its config. Raises ProblemError if it ends or needs longer."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if _write_identity(files.config) != written_before and not ended:
            return
        if ended:
            if process.returncode == 0:
                return
            cause = _cause(files.logs / LOG_NAME, log_size)
            if process.returncode == 2:
                raise ProblemError(422, cause, [FieldProblem(field="body.config", problem=cause)])
            raise ProblemError(503, f"run {files.root.name!r}: {cause}")
        time.sleep(POLL_SECONDS)
    raise ProblemError(
        504,
        f"run {files.root.name!r}: is still checking its config and inputs after {START_TIMEOUT_SECONDS:g} seconds; the start "
        f"continues. GET /runs/{files.root.name} answers once it trains; if it does not, its logs/{LOG_NAME} says why",
    )


def _write_identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is rewritten, or None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _cause(output: Path, log_size: int) -> str:
    """Return the last error message after the first ``log_size`` bytes of a log, or its last line if it has no error."""
    try:
        text = output.read_bytes()[log_size:].decode(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it ended at once and logged nothing"])[-1].replace("config /dev/stdin", "config")


def _invalid_fields(problems: list[tuple[str, str]]) -> ProblemError:
    fields = [
        FieldProblem(field=printable(f"body.config.{key}" if key else "body.config"), problem=printable(text))
        for key, text in problems
    ]
    return ProblemError(422, "; ".join(f"{field.field}: {field.problem}" for field in fields), fields)
