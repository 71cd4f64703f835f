"""A run whose processes this process starts and supervises: `quartet train` and `quartet.train`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from shlex import quote

from quartet.config.root import Config
from quartet.contract.control import Progress, RunState
from quartet.contract.status import Role
from quartet.errors import ConfigError, QuartetError, ServiceFailed
from quartet.launcher.launcher import Launcher
from quartet.launcher.progress_text import Display, steps_of
from quartet.preflight import check_earlier_run, problems
from quartet.preflight.findings import raise_errors
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.locking_and_removal import (
    delete_earlier_run,
    lock_run_directory,
    move_earlier_run_aside,
    remove_run,
    restore_earlier_run,
)
from quartet.run_directory.run_files import RunFiles, RunOutcome


@contextmanager
def started_run(
    config: Config,
    overwrite: bool,
    resume: bool,
    report: Callable[[str], None],
    activity: Callable[[str], AbstractContextManager[object]],
    interrupted: threading.Event | None = None,
    with_token: bool = True,
    continue_with: str | None = None,
) -> Iterator[tuple[Launcher, RunFiles]]:
    """Start the processes of a run. An earlier run that it replaces is restored unless this run completes a step.

    ``report`` prints a line for the user, ``activity`` shows what happens while its context is open. ``with_token`` False reports
    the link to the dashboard without its token. ``continue_with``: command that continues the run, if it is not `quartet train`.
    Raises KeyboardInterrupt if ``interrupted`` is set while the services start.
    """
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume: one replaces the earlier run, the other resumes it; give only one")
    files = RunFiles(config.run_directory)
    continue_with = continue_with or f"quartet train {quote(str(files.config))} --resume"
    found = problems(config, files, overwrite, resume, report)
    for finding in found:
        # The progress of the run shows the warnings about prompts.
        if finding.level == "warning" and not finding.where.startswith("data."):
            report(str(finding))
    raise_errors(found)
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
            files.outcome.unlink(missing_ok=True)
            with Launcher(config, files.config, interrupted) as launcher:
                with activity("starting the services"):
                    try:
                        launcher.start(report=report)
                    except QuartetError as error:
                        _record_failure(files, error)
                        raise
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
                    if files.metrics.exists() and files.read_outcome() is None:
                        report(f"to continue: {continue_with}")
                    raise
                except QuartetError as error:
                    _record_failure(files, error)
                    if not files.metrics.exists():
                        raise
                    message = f"{error}\nto continue once the cause is fixed: {continue_with}"
                    raise type(error)(message) from error
                report("stopping the services")
        finally:
            files.services.unlink(missing_ok=True)
            files.gateway.unlink(missing_ok=True)
            restore_earlier_run(files)


def _record_failure(files: RunFiles, error: QuartetError) -> None:
    """Record what the user sees, unless the orchestrator has: it may know less, or be lost."""
    known = files.read_outcome()
    if known is None or known.message != str(error):
        with suppress(QuartetError):  # A full disk, or damaged metrics: the error itself is shown.
            files.write_outcome(RunOutcome.of(error, files.last_step()))


RECONNECT_SECONDS = 0.2
"""Pause before reconnecting to the progress stream."""
POLL_SECONDS = 0.2
"""Interval between two looks at the processes of a run without progress."""
LOST = ("ServiceUnavailable", "ServiceFailed", "NoResponse", "EngineFailed")
"""Errors of calls to a process that may have ended."""


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

    If the orchestrator ends without an outcome, it is restarted at the same address and the progress stream reconnects. Returns
    FINISHED or STOPPED. Raises ConfigError or ServiceFailed if the run fails, or if a process exceeds its restart limit;
    KeyboardInterrupt if ``interrupted`` is set.
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
        outcome = None
        try:
            progress = updates.get(timeout=POLL_SECONDS)
        except queue.Empty:
            pass
        else:
            if progress is None:
                # The orchestrator may have ended before all of its progress was read.
                outcome = files.read_outcome()
            else:
                # After a rollback the step is lower than the last one shown. Recomputed steps are shown again.
                display.rewind(progress.step)
                display.show(progress)
                if progress.step:
                    delete_earlier_run(files)
                if progress.state.ended:
                    outcome = files.read_outcome() or _unrecorded(progress)
        if outcome is not None:
            if outcome.state is RunState.FAILED:
                # A process that has ended says more than a call to it.
                launcher.raise_if_down(outcome.service if outcome.error in LOST else "")
                outcome.raise_failure()
            if outcome.state is RunState.STOPPED:
                display.print_line(f"stopped after step {steps_of(outcome.step, launcher.total_steps, ' of ')}")
            return outcome.state
        for line in launcher.check():
            display.print_line(line)


def _unrecorded(progress: Progress) -> RunOutcome:
    """Return the outcome in the last progress: a full disk may refuse the record."""
    error = {0: "", 2: ConfigError.__name__}.get(progress.exit_code, ServiceFailed.__name__)
    return RunOutcome(progress.state, progress.step, error, progress.error)
