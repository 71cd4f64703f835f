"""What users ask of a run while it goes on: to pause, to go on, to stop. It is heard between two steps."""

from __future__ import annotations

import threading
from pathlib import Path

from quartet.files import storing, write_durably


class Control:
    """Thread-safe: any number of callers ask, the training thread looks."""

    def __init__(self, mark: Path | None = None) -> None:
        """``mark`` is a file that says what was asked last, "pause" or "stop": an orchestrator that is restarted hears it too."""
        self._changed = threading.Condition()
        self._mark = mark
        asked = mark.read_text(encoding="utf-8").strip() if mark is not None and mark.exists() else ""
        self._stopping, self._pausing = asked == "stop", asked == "pause"
        self._checkpoint, self._back_to = False, 0

    def stop(self) -> None:
        """Stop after the step in hand."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            # Last: what cannot be written is done all the same.
            self._note("stop")

    def pause(self) -> None:
        """Wait after the step in hand."""
        with self._changed:
            self._pausing = True
            if not self._stopping:
                self._note("pause")

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._pausing = False
            if self._mark is not None and not self._stopping:
                self._mark.unlink(missing_ok=True)
            self._changed.notify_all()

    def checkpoint(self) -> None:
        """Save a checkpoint after the step in hand."""
        with self._changed:
            self._checkpoint = True
            self._changed.notify_all()

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of ``step``, 1 or later, after the step in hand."""
        with self._changed:
            self._back_to = step
            self._changed.notify_all()

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint is asked for, which counts as heard with that."""
        with self._changed:
            asked, self._checkpoint = self._checkpoint, False
            return asked

    def take_roll_back(self) -> int:
        """The step to go back to, 0 for none, which counts as heard with that."""
        with self._changed:
            step, self._back_to = self._back_to, 0
            return step

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop."""
        with self._changed:
            return self._stopping

    @property
    def paused(self) -> bool:
        """Whether the run is to wait; a run that is to stop does not wait."""
        with self._changed:
            return self._pausing and not self._stopping

    def wait_while_paused(self) -> None:
        """Returns when the run is to go on or to stop, or something is asked of it that it can do while it waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._pausing or self._checkpoint or self._back_to > 0)

    def _note(self, asked: str) -> None:
        if self._mark is not None:
            with storing(self._mark):
                write_durably(self._mark, asked + "\n")
