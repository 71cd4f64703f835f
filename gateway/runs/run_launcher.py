"""Runs that operators start: each is a `quartet train` of its own, which outlives the gateway."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import structlog
import yaml

from quartet.config import Config, parse_config, invalid_keys
from quartet.durable_files import write_durably
from quartet.errors import ConfigError
from quartet.gateway.audit import audited, printable
from quartet.gateway.http_errors import ProblemError
from quartet.gateway.runs.catalog import Runs
from quartet.gateway.schemas import FieldProblem, StartRun
from quartet.processes import of_module
from quartet.run_directory.run_files import RunFiles

log = structlog.get_logger()

MAX_RUNS = 8
"""Runs that go on at a time, of those started here."""
EARLY = 20.0
"""Seconds for which a run is waited for until its inputs are looked at; usually that takes two."""
POLL = 0.05
"""Seconds between two looks at it."""
LOG = "quartet.log"
_SECRETS = ("QUARTET_GATEWAY_TOKEN", "QUARTET_GATEWAY_VIEWER_TOKEN", "QUARTET_BUFFER_URL")
"""Settings of the gateway's own run, which another must not take for its own."""


class Starter:
    """Starts runs below one folder. Safe to use from several threads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lock = threading.Lock()
        self._going: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, wanted: StartRun, who: str) -> Config:
        """Starts a run whose config and inputs are right. Raises ProblemError, with the fields that are wrong."""
        tree = self._own(wanted.config)
        run = tree.get("run")
        name = run.get("name") if isinstance(run, dict) else None
        # Who writes down a refusal, and where: a name that is none has no folder.
        problems = invalid_keys(tree)
        files = RunFiles(self._runs.folder / (name if isinstance(name, str) and not problems else "-"))
        details = {"name": name if isinstance(name, str) else None, "resume": wanted.resume}
        with audited(files, who, "start", details):
            if problems:
                raise _wrong(problems)
            config = parse_config(tree, "of the request")
            self._begin(config, tree, RunFiles(config.run_directory), wanted.resume)
        return config

    def processes(self) -> dict[str, subprocess.Popen[bytes]]:
        """Those of runs that were started here and go on, by the runs' names."""
        return {name: process for name, process in self._going.copy().items() if process.poll() is None}

    def _own(self, given: dict[str, Any]) -> dict[str, Any]:
        """The config, in the gateway's folder and without a gateway: this one shows it."""
        tree = dict(given)
        run, gateway = tree.get("run", {}), tree.get("gateway", {})
        if isinstance(run, dict):
            tree["run"] = {**run, "directory": str(self._runs.folder)}
            if "name" not in run:
                raise ProblemError(
                    422,
                    "body.config.run.name: missing; a run that is started here needs a name of its own",
                    [FieldProblem(field="body.config.run.name", problem="missing; expected a name of its own")],
                )
        if isinstance(gateway, dict):
            tree["gateway"] = {**gateway, "enabled": False}
        return tree

    def _begin(self, config: Config, tree: dict[str, Any], files: RunFiles, resume: bool) -> None:
        name = config.run.name
        with self._lock:
            self._going = self.processes()
            if name in self._going:
                raise ProblemError(409, f"run {name!r}: goes on already; wait for its end, or choose another run.name")
            if len(self._going) >= MAX_RUNS:
                raise ProblemError(
                    409, f"{MAX_RUNS} runs that were started here go on; wait for the end of one, or stop one"
                )
            _make_room(files, resume)
            seen = _written(files.config)
            output = files.logs / LOG
            said_before = output.stat().st_size if output.exists() else 0
            process = _train(tree, output, resume)
            self._going[name] = process
        threading.Thread(target=process.wait, name=f"run {name}", daemon=True).start()
        _wait_until_begun(process, files, seen, said_before)


def _make_room(files: RunFiles, resume: bool) -> None:
    """Raises ProblemError where the name is in use, or there is nothing to go on with."""
    if resume and not files.is_a_run():
        raise ProblemError(409, f"run {files.root.name!r}: there is none to go on with; leave resume out to start one")
    try:
        with files.claimed():
            if not resume:
                files.check_unused()
                # Before the log is begun, which would go with it otherwise.
                _clear(files)
            files.logs.mkdir(exist_ok=True)
    except ConfigError as error:
        raise ProblemError(409, str(error)) from None


def _clear(files: RunFiles) -> None:
    """Removes a run that took no step, and leaves its audit: who stopped it, and who starts it anew, belong in one list."""
    audit = files.audit.read_bytes() if files.audit.is_file() else None
    files.clear()
    if audit is not None:
        write_durably(files.audit, audit.decode(errors="replace"))


def _train(tree: dict[str, Any], output: Path, resume: bool) -> subprocess.Popen[bytes]:
    # Through a pipe: a config may hold a password, which is to be in no file.
    command = of_module("quartet.cli.main", "train", "/dev/stdin", *(["--resume"] if resume else []))
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    with output.open("ab") as log_file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=environment,
            # Neither the end of the gateway nor a Ctrl-C in its terminal is to end a run.
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(yaml.safe_dump(tree, allow_unicode=True).encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # It has ended already; its log says why.
    return process


def _wait_until_begun(
    process: subprocess.Popen[bytes], files: RunFiles, seen: tuple[int, int] | None, said_before: int
) -> None:
    """Returns when the run has looked at its inputs and written its config. Raises ProblemError when it ends instead."""
    deadline = time.monotonic() + EARLY
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if _written(files.config) != seen and not ended:
            return
        if ended:
            if process.returncode == 0:
                return
            cause = _cause(files.logs / LOG, said_before)
            if process.returncode == 2:
                raise ProblemError(422, cause, [FieldProblem(field="body.config", problem=cause)])
            raise ProblemError(503, f"run {files.root.name!r}: {cause}")
        time.sleep(POLL)


def _written(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns


def _cause(output: Path, said_before: int) -> str:
    """What the run said last, its error if there is one."""
    try:
        text = output.read_bytes()[said_before:].decode(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it ended at once and said nothing"])[-1].replace("config /dev/stdin", "config")


def _wrong(problems: list[tuple[str, str]]) -> ProblemError:
    fields = [
        FieldProblem(field=printable(f"body.config.{key}" if key else "body.config"), problem=printable(text))
        for key, text in problems
    ]
    return ProblemError(422, "; ".join(f"{field.field}: {field.problem}" for field in fields), fields)
