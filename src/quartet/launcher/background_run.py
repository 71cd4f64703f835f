"""A run in a thread of this process: the launcher needs a thread that lives as long as the run."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quartet.config.root import Config
from quartet.contract.control import Progress, RunState
from quartet.launcher.local_run import follow_run, started_run
from quartet.launcher.progress_text import LineView
from quartet.run_directory.run_files import RunFiles

MAX_STEP_LINES = 20
"""Approximate number of lines about steps in the output of a run."""


class ProgressLines(LineView):
    """Lines about a run for another thread, and its state before the end."""

    def __init__(self, run: str) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.state = RunState.STARTING
        super().__init__(run, self._lines.put, MAX_STEP_LINES)

    def show(self, progress: Progress) -> None:
        """Collect new lines."""
        # The final state follows when the processes have stopped.
        if not progress.state.ended:
            self.state = progress.state
        super().show(progress)

    def take(self, timeout: float) -> str | None:
        """Return the next line, or None if there is none within ``timeout`` seconds."""
        try:
            return self._lines.get(timeout=timeout) if timeout > 0 else self._lines.get_nowait()
        except queue.Empty:
            return None


class BackgroundRun:
    """A run whose processes a thread of this process starts, supervises and stops. It ends with this process."""

    def __init__(self, config: Config, overwrite: bool, resume: bool) -> None:
        """Start the run. Returns when the input is checked. Raises the error if the check fails."""
        self.display = ProgressLines(str(config.run_directory))
        self.dashboard: str | None = None
        self._end_state: RunState | None = None
        self.error: Exception | None = None
        """The error that ended the run."""
        self.interrupted = False
        """True if ``interrupt`` ended the run before its last step."""
        self._process = os.getpid()
        self._checked, self._interrupt, self._ended = threading.Event(), threading.Event(), threading.Event()
        # A daemon thread: the interpreter would wait for any other before it calls the exit handlers.
        self._thread = threading.Thread(
            target=self._run, args=(config, overwrite, resume), name=f"run {config.run.name}", daemon=True
        )
        atexit.register(self.interrupt)
        self._thread.start()
        try:
            self._checked.wait()
        except KeyboardInterrupt:
            self.interrupt()
            raise
        if self.ended and self.error is not None:
            raise self.error

    @property
    def state(self) -> RunState:
        """Return the state of the run. It is final when the processes have stopped."""
        return self._end_state or self.display.state

    @property
    def ended(self) -> bool:
        """Return whether the run has ended and its processes are stopped."""
        return self._ended.is_set()

    def interrupt(self) -> None:
        """End the run as Ctrl-C ends `quartet train`, and wait until its processes have stopped. Does nothing in a fork."""
        if os.getpid() != self._process:
            return  # A fork has no thread that could end the run.
        self._interrupt.set()
        self._ended.wait()

    def _run(self, config: Config, overwrite: bool, resume: bool) -> None:
        try:
            with started_run(
                config, overwrite, resume, self.display.print_line, self._activity, self._interrupt, with_token=False
            ) as (launcher, files):
                self.dashboard = launcher.dashboard_link
                self._end_state = follow_run(launcher, files, self.display, self._interrupt)
        except KeyboardInterrupt:
            self.interrupted = True
        except Exception as error:
            self.error, self._end_state = error, RunState.FAILED
        finally:
            self.dashboard = None
            atexit.unregister(self.interrupt)
            self._ended.set()
            self._checked.set()

    @contextmanager
    def _activity(self, text: str) -> Iterator[None]:
        self.display.print_line(text)
        self._checked.set()
        yield


def saved_state(files: RunFiles, steps: int, last_step: int) -> str:
    """Return "finished", "stopped", "failed" or, if it was interrupted, "idle" for a run that is not active."""
    if last_step >= steps and files.policy_step() == last_step:
        return RunState.FINISHED.value
    outcome = files.read_outcome()
    # A rollback or a fork since then starts from another step.
    return outcome.state.value if outcome is not None and outcome.step == last_step else "idle"
