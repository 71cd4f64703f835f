"""Operator commands of an active run: pause, resume, stop, save a checkpoint, roll back, profile."""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from quartet.contract.profile import MAX_PROFILED_STEPS
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest, StorageFailed
from quartet.run_directory.checkpoints import checkpoint_folders, checkpoint_step, checkpoints_after
from quartet.run_directory.run_files import RunFiles
from quartet.system.durable_files import storage_errors, write_durably

log = structlog.get_logger()


class RunControl:
    """Commands from any thread, carried out by the training thread between two steps.

    A command is on disk before it is confirmed, so a restarted orchestrator still sees it. A profile is not: the services lose
    what they have recorded, too, and the user asks again.
    """

    def __init__(self, files: RunFiles, persist: bool = True) -> None:
        """Read the pending commands of the run. Without ``persist``, commands are neither read nor written."""
        self._files = files
        self._persist = persist
        self._changed = threading.Condition()
        words = self._read(files.pending_commands).split()
        self._stopping, self._pausing, self._checkpoint = (word in words for word in ("stop", "pause", "checkpoint"))
        step = self._read(files.rolling_back).strip()
        self._rollback_step = int(step) if step.isdecimal() else 0
        self._profile_steps, self._profiling = 0, False
        self._closed = False

    def stop(self) -> None:
        """Stop the run after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            # Written last: if the write fails, the run stops anyway.
            self._write()

    def pause(self) -> None:
        """Pause the run after the current step. Raises FailedPrecondition at the end of the run."""
        with self._changed:
            self._check_open()
            self._pausing = True
            self._write()

    def resume(self) -> None:
        """Continue a paused run."""
        with self._changed:
            self._pausing = False
            self._changed.notify_all()
            self._write()

    def checkpoint(self) -> None:
        """Save a checkpoint after the current step. Raises FailedPrecondition at the end of the run."""
        with self._changed:
            self._check_open()
            self._checkpoint = True
            self._changed.notify_all()
            self._write()

    def roll_back(self, step: int) -> None:
        """Return to the checkpoint of ``step``, 1 or later, after the current step.

        Raises InvalidRequest if there is no such checkpoint, FailedPrecondition if a later checkpoint is tagged or the run is at
        its end, and StorageFailed if the command cannot be written.
        """
        steps = [checkpoint_step(folder) for folder in checkpoint_folders(self._files)]
        if step not in steps:
            raise InvalidRequest(
                f"step {step}: has no checkpoint; checkpoints exist for: {', '.join(map(str, steps)) or 'none'}"
            )
        try:
            checkpoints_after(self._files, step)
        except ConfigError as error:
            raise FailedPrecondition(str(error)) from None
        with self._changed:
            self._check_open()
            if self._persist:
                with storage_errors(self._files.rolling_back):
                    write_durably(self._files.rolling_back, f"{step}\n")
            self._rollback_step = step
            self._changed.notify_all()

    def profile(self, steps: int) -> None:
        """Profile the next ``steps`` steps. Raises InvalidRequest, and FailedPrecondition if a profile is under way."""
        if not 1 <= steps <= MAX_PROFILED_STEPS:
            raise InvalidRequest(f"steps {steps}: expected 1 to {MAX_PROFILED_STEPS}")
        with self._changed:
            self._check_open()
            if self._profiling or self._profile_steps:
                raise FailedPrecondition("a profile is under way already; wait until it is complete")
            self._profile_steps = steps

    @property
    def profile_due(self) -> bool:
        """True if a profile was requested that has not begun."""
        with self._changed:
            return self._profile_steps > 0

    def take_profile_command(self) -> int:
        """Return the number of steps of a requested profile, and 0 without one. It is under way until ``finish_profile``."""
        with self._changed:
            steps, self._profile_steps = self._profile_steps, 0
            self._profiling = self._profiling or steps > 0
            return steps

    def finish_profile(self) -> None:
        """Accept the next profile."""
        with self._changed:
            self._profiling = False

    @property
    def rollback_step(self) -> int:
        """Step of the checkpoint to return to; 0 if no rollback is pending."""
        with self._changed:
            return self._rollback_step

    def finish_rollback(self) -> None:
        """Clear the pending rollback, whether it succeeded or not."""
        with self._changed:
            self._rollback_step = 0
            if self._persist:
                self._files.rolling_back.unlink(missing_ok=True)

    def take_checkpoint_command(self) -> bool:
        """Return whether a checkpoint was requested, and clear the request."""
        with self._changed:
            requested, self._checkpoint = self._checkpoint, False
            if requested:
                try:
                    self._write()
                except StorageFailed as error:
                    # The request stays on disk: at worst a restart saves one more checkpoint.
                    log.warning("command file not updated", error=str(error))
            return requested

    @property
    def idle(self) -> bool:
        """True if no command is pending."""
        with self._changed:
            return not (self._stopping or self._pausing or self._checkpoint or self._rollback_step)

    @property
    def stopping(self) -> bool:
        """True if the run is to stop."""
        with self._changed:
            return self._stopping

    @property
    def paused(self) -> bool:
        """True if the run is to wait. Stop takes precedence over pause."""
        with self._changed:
            return self._pausing and not self._stopping

    def wait_while_paused(self) -> None:
        """Wait until the run is to continue or stop, or a command arrives that a paused run can carry out."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or not self._pausing or self._checkpoint or self._rollback_step > 0
            )

    def close(self) -> bool:
        """Refuse further commands, because the run is at its end. Returns False, and stays open, if a command is pending."""
        with self._changed:
            self._closed = not (self._checkpoint or self._rollback_step)
            return self._closed

    def open(self) -> None:
        """Accept commands again, because the run continues."""
        with self._changed:
            self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise FailedPrecondition("the run is at its end and saves its policy; it accepts no more commands")

    def _write(self) -> None:
        if not self._persist:
            return
        pending = {
            "stop": self._stopping,
            "pause": self._pausing and not self._stopping,
            "checkpoint": self._checkpoint,
        }
        words = [word for word, requested in pending.items() if requested]
        path = self._files.pending_commands
        with storage_errors(path):
            if words:
                write_durably(path, "\n".join(words) + "\n")
            else:
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> str:
        return path.read_text(encoding="utf-8") if self._persist and path.exists() else ""
