"""`quartet train` and `quartet up`: start a run and show its progress."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from rich.console import Console

from quartet.cli.progress_view import View, make_view
from quartet.config import Config, load_config, redact_url
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.launcher.launcher import Launcher
from quartet.launcher.security_checks import check_access
from quartet.preflight import check_gateway, check_inputs, check_resumable, unused_settings
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.locking_and_removal import (
    check_unused,
    delete_earlier_run,
    lock_run_directory,
    move_earlier_run_aside,
    remove_run,
    restore_earlier_run,
)
from quartet.run_directory.run_files import RunFiles
from quartet.types import Progress, Role, RunState

console = Console()


def train(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Train, then stop all processes that were started."""
    config = load_config(config_path, overrides)
    run(config, overwrite, resume)
    files = RunFiles(config.run_directory)
    console.print(f"policy: {files.policy}\nmetrics: {files.metrics}", highlight=False, soft_wrap=True)


def up(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Train, then keep the services running until interrupted."""
    config = load_config(config_path, overrides)
    with _started(config, overwrite, resume) as (launcher, files):
        for role, address in launcher.addresses.items():
            console.print(f"{role:<13} {address}", highlight=False)
        console.print(f"redis         {redact_url(launcher.url)}", highlight=False, soft_wrap=True)
        show_progress(launcher, files)
        console.print(
            "the run has ended; the model services keep running until Ctrl-C (a restarted service has its initial weights)",
            highlight=False,
            soft_wrap=True,
        )
        while True:
            _print_lines(launcher.check())
            time.sleep(0.5)


def run(config: Config, overwrite: bool, resume: bool = False) -> None:
    """Execute a run from start to end, and stop its processes. Raises the error that ends it early."""
    with _started(config, overwrite, resume) as (launcher, files):
        show_progress(launcher, files)


@contextmanager
def _started(config: Config, overwrite: bool, resume: bool) -> Iterator[tuple[Launcher, RunFiles]]:
    """Start the processes of a run. An earlier run that it replaces is restored unless this run completes a step."""
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume: one replaces the earlier run, the other resumes it; give only one")
    check_inputs(config, lambda line: _print_lines([line]))
    check_access(config)
    check_gateway(config)
    for note in unused_settings(config):
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    files = RunFiles(config.run_directory)
    with lock_run_directory(files):
        if overwrite:
            move_earlier_run_aside(files)
        try:
            if resume:
                check_resumable(config, files)
            else:
                check_unused(files)
                # Files of an earlier run that completed no step, such as its baseline or an embedded Redis, are not part of
                # this run.
                remove_run(files)
            files.write_config(config.to_yaml())
            # A start or resume overrides an earlier pause command.
            files.pending_commands.unlink(missing_ok=True)
            with Launcher(config, files.config) as launcher:
                _start_services(launcher)
                _print_lines(launcher.check())
                files.write_services(launcher.addresses)
                if launcher.dashboard_link is not None:
                    _print_lines([f"dashboard: {launcher.dashboard_link}"])
                try:
                    yield launcher, files
                except KeyboardInterrupt:
                    if files.metrics.exists() and not launcher.run_ended:
                        _print_lines([f"to continue: quartet train {quote(str(files.config))} --resume"])
                    raise
                console.print("stopping the services", highlight=False)
        finally:
            files.services.unlink(missing_ok=True)
            files.gateway.unlink(missing_ok=True)
            restore_earlier_run(files)


def _start_services(launcher: Launcher) -> None:
    if not console.is_terminal:
        console.print("starting the services")
    with console.status("starting the services"):
        launcher.start()


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


RECONNECT_SECONDS = 0.2
"""Pause before reconnecting to the progress stream."""


class _ProgressStream:
    """Progress of the orchestrator, received by a background thread that reconnects after failures."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials
        self._client: OrchestratorClient | None = None
        self._closed = threading.Event()
        self.queue: queue.Queue[Progress | None] = queue.Queue()
        """Received progress. None means a broken connection or a failed attempt to reconnect."""
        threading.Thread(target=self._receive, name="watch", daemon=True).start()

    def close(self) -> None:
        """Stop receiving."""
        self._closed.set()
        if self._client is not None:
            self._client.close()

    def _receive(self) -> None:
        step = 0
        while not self._closed.is_set():
            # A new channel for each attempt: a failed channel waits longer and longer before it reconnects.
            self._client = OrchestratorClient(self._address, 0.0, self._credentials)
            try:
                for progress in self._client.watch(step):
                    self.queue.put(progress)
                    step = progress.step
                    if progress.state.ended:
                        return
            except QuartetError:
                pass
            finally:
                self._client.close()
            self.queue.put(None)
            self._closed.wait(RECONNECT_SECONDS)


def show_progress(launcher: Launcher, files: RunFiles) -> None:
    """Show the run and supervise its processes until it ends. A replaced earlier run is deleted after the first step.

    If the orchestrator crashes, it is restarted at the same address and the progress stream reconnects. Raises ConfigError or
    ServiceFailed if the run fails, or if a process exceeds its restart limit.
    """
    stream = _ProgressStream(launcher.addresses[Role.ORCHESTRATOR], launcher.credentials)
    try:
        with make_view(console, files.root) as view:
            _follow(launcher, stream.queue, view, files)
    finally:
        stream.close()


def _follow(launcher: Launcher, updates: queue.Queue[Progress | None], view: View, files: RunFiles) -> None:
    while True:
        try:
            progress = updates.get(timeout=0.2)
        except queue.Empty:
            _supervise(launcher, view)
            continue
        if progress is None:
            _supervise(launcher, view)
            if launcher.run_ended:
                _explain_end(launcher)
                return
            continue
        # After a rollback the step is lower than the last one shown. Recomputed steps are shown again.
        view.rewind(progress.step)
        view.show(progress)
        if progress.step:
            delete_earlier_run(files)
        if progress.state is RunState.FAILED:
            _blame_a_service(launcher)
            kind = ConfigError if progress.exit_code == 2 else ServiceFailed
            raise kind(progress.error)
        if progress.state.ended:
            if progress.state is RunState.STOPPED:
                console.print(f"stopped after step {progress.step} of {progress.total_steps}", highlight=False)
            return
        # While progress arrives, the orchestrator is healthy.
        _supervise(launcher, view, orchestrator=False)


def _supervise(launcher: Launcher, view: View, orchestrator: bool = True) -> None:
    for line in launcher.check(orchestrator):
        view.print_line(line)


def _blame_a_service(launcher: Launcher, wait: float = 1.0) -> None:
    """Raise the error of a crashed service. The orchestrator may notice a crash before the launcher does."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        launcher.raise_if_down()
        time.sleep(0.05)


def _explain_end(launcher: Launcher) -> None:
    """Explain the end of an orchestrator that exited normally while the progress stream was disconnected."""
    if launcher.outcome is None:
        _blame_a_service(launcher)
        raise ServiceFailed(
            "orchestrator: its progress stream ended before the run; see logs/orchestrator.log of the run"
        )
    if launcher.outcome == "stopped":
        console.print("stopped before the last step", highlight=False)
