"""A run whose processes this process starts and supervises: `quartet train` and `quartet.train`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from shlex import quote

from quartet.config.root import Config
from quartet.contract.control import Progress, RunState
from quartet.contract.status import Role
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.launcher.display import Display
from quartet.launcher.launcher import Launcher
from quartet.preflight import check_earlier_run, problems, raise_errors
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.locking_and_removal import (
    delete_earlier_run,
    lock_run_directory,
    move_earlier_run_aside,
    remove_run,
    restore_earlier_run,
)
from quartet.run_directory.run_files import RunFiles


@contextmanager
def started_run(
    config: Config,
    overwrite: bool,
    resume: bool,
    report: Callable[[str], None],
    activity: Callable[[str], AbstractContextManager[object]],
    interrupted: threading.Event | None = None,
    with_token: bool = True,
) -> Iterator[tuple[Launcher, RunFiles]]:
    """Start the processes of a run. An earlier run that it replaces is restored unless this run completes a step.

    ``report`` prints a line for the user, ``activity`` shows what happens while its context is open. ``with_token`` False reports
    the link to the dashboard without its token. Raises KeyboardInterrupt if ``interrupted`` is set while the services start.
    """
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume: one replaces the earlier run, the other resumes it; give only one")
    files = RunFiles(config.run_directory)
    found = problems(config, files, overwrite, resume, report)
    raise_errors(found)
    for finding in found:
        # The progress of the run shows the warnings about prompts.
        if finding.level == "warning" and not finding.where.startswith("data."):
            report(str(finding))
    with lock_run_directory(files):
        if overwrite:
            move_earlier_run_aside(files)
        try:
            check_earlier_run(config, files, resume)
            if not resume:
                # Files of an earlier run that completed no step, such as its baseline or an embedded Redis, are not part of
                # this run.
                remove_run(files)
            files.write_config(config.to_yaml())
            # A start or resume overrides an earlier pause command.
            files.pending_commands.unlink(missing_ok=True)
            with Launcher(config, files.config, interrupted) as launcher:
                with activity("starting the services"):
                    launcher.start(report=report)
                for line in launcher.check():
                    report(line)
                files.write_services(launcher.addresses)
                if (link := launcher.dashboard_link) is not None:
                    # A notebook saves what it prints.
                    public = f"{link.partition('#')[0]} (Run.dashboard is the link with its token)"
                    report(f"dashboard: {link if with_token else public}")
                try:
                    yield launcher, files
                except KeyboardInterrupt:
                    if files.metrics.exists() and not launcher.run_ended:
                        report(f"to continue: {_resume_command(files)}")
                    raise
                except QuartetError as error:
                    if not files.metrics.exists():
                        raise
                    message = f"{error}\nto continue once the cause is fixed: {_resume_command(files)}"
                    raise type(error)(message) from error
                report("stopping the services")
        finally:
            files.services.unlink(missing_ok=True)
            files.gateway.unlink(missing_ok=True)
            restore_earlier_run(files)


def _resume_command(files: RunFiles) -> str:
    return f"quartet train {quote(str(files.config))} --resume"


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
            client = self._client = OrchestratorClient(self._address, 0.0, self._credentials)
            if self._closed.is_set():
                client.close()
                return
            try:
                for progress in client.watch(step):
                    self.queue.put(progress)
                    step = progress.step
                    if progress.state.ended:
                        return
            except QuartetError:
                pass
            finally:
                client.close()
            self.queue.put(None)
            self._closed.wait(RECONNECT_SECONDS)


def follow_run(
    launcher: Launcher, files: RunFiles, display: Display, interrupted: threading.Event | None = None
) -> RunState:
    """Show the run and supervise its processes until it ends. A replaced earlier run is deleted after the first step.

    If the orchestrator crashes, it is restarted at the same address and the progress stream reconnects. Returns FINISHED or
    STOPPED. Raises ConfigError or ServiceFailed if the run fails, or if a process exceeds its restart limit; KeyboardInterrupt if
    ``interrupted`` is set.
    """
    stream = _ProgressStream(launcher.addresses[Role.ORCHESTRATOR][0], launcher.credentials)
    try:
        return _follow(launcher, stream.queue, display, files, interrupted or threading.Event())
    finally:
        stream.close()


def _follow(
    launcher: Launcher,
    updates: queue.Queue[Progress | None],
    display: Display,
    files: RunFiles,
    interrupted: threading.Event,
) -> RunState:
    while True:
        if interrupted.is_set():
            raise KeyboardInterrupt
        try:
            progress = updates.get(timeout=0.2)
        except queue.Empty:
            _supervise(launcher, display)
            continue
        if progress is None:
            _supervise(launcher, display)
            if launcher.run_ended:
                return _end_state(launcher, display)
            continue
        # After a rollback the step is lower than the last one shown. Recomputed steps are shown again.
        display.rewind(progress.step)
        display.show(progress)
        if progress.step:
            delete_earlier_run(files)
        if progress.state is RunState.FAILED:
            _blame_a_service(launcher)
            kind = ConfigError if progress.exit_code == 2 else ServiceFailed
            raise kind(progress.error)
        if progress.state.ended:
            if progress.state is RunState.STOPPED:
                display.print_line(f"stopped after step {progress.step} of {progress.total_steps}")
            return progress.state
        # While progress arrives, the orchestrator is healthy.
        _supervise(launcher, display, orchestrator=False)


def _supervise(launcher: Launcher, display: Display, orchestrator: bool = True) -> None:
    for line in launcher.check(orchestrator):
        display.print_line(line)


def _blame_a_service(launcher: Launcher, wait: float = 1.0) -> None:
    """Raise the error of a crashed service. The orchestrator may notice a crash before the launcher does."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        launcher.raise_if_down()
        time.sleep(0.05)


def _end_state(launcher: Launcher, display: Display) -> RunState:
    """Return the outcome of an orchestrator that exited normally while the progress stream was disconnected."""
    if launcher.outcome is None:
        _blame_a_service(launcher)
        raise ServiceFailed(
            "orchestrator: its progress stream ended before the run; see logs/orchestrator.log of the run"
        )
    if launcher.outcome == "stopped":
        display.print_line("stopped before the last step")
        return RunState.STOPPED
    return RunState.FINISHED
