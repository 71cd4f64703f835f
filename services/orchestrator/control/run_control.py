"""What users ask of a run while it goes on: to pause, go on, stop, save a checkpoint or go back to one."""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from quartet.durable_files import storing, write_durably
from quartet.errors import FailedPrecondition, StorageFailed

log = structlog.get_logger()


class Control:
    """Thread-safe: any number of callers ask, the training thread looks.

    What was asked is on the disk before it is confirmed: an orchestrator that is restarted hears it too.
    """

    def __init__(self, mark: Path | None = None) -> None:
        """``mark`` is a file with a word for each thing that is asked for; beside it ``rolling_back`` has the step to go back to.

        None: nothing is written down.
        """
        self._changed = threading.Condition()
        self._mark = mark
        self._back_mark = mark.with_name("rolling_back") if mark is not None else None
        words = _read(self._mark).split()
        self._stopping, self._pausing, self._checkpoint = (word in words for word in ("stop", "pause", "checkpoint"))
        step = _read(self._back_mark).strip()
        self._back_to = int(step) if step.isdecimal() else 0
        self._closed = False

    def stop(self) -> None:
        """Stop after the step in hand."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            # Last: what cannot be written is done all the same.
            self._note()

    def pause(self) -> None:
        """Wait after the step in hand. Raises FailedPrecondition at the run's end."""
        with self._changed:
            self._refuse_at_the_end()
            self._pausing = True
            self._note()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._pausing = False
            self._changed.notify_all()
            self._note()

    def checkpoint(self) -> None:
        """Save a checkpoint after the step in hand. Raises FailedPrecondition at the run's end."""
        with self._changed:
            self._refuse_at_the_end()
            self._checkpoint = True
            self._changed.notify_all()
            self._note()

    def roll_back(self, step: int) -> None:
        """Go back to the checkpoint of ``step``, 1 or later, after the step in hand.

        Raises FailedPrecondition at the run's end, StorageFailed where it cannot be written down.
        """
        with self._changed:
            self._refuse_at_the_end()
            if self._back_mark is not None:
                with storing(self._back_mark):
                    write_durably(self._back_mark, f"{step}\n")
            self._back_to = step
            self._changed.notify_all()

    @property
    def going_back_to(self) -> int:
        """The step of the checkpoint to go back to, 0 for none."""
        with self._changed:
            return self._back_to

    def rolled_back(self) -> None:
        """The run has gone back, or cannot."""
        with self._changed:
            self._back_to = 0
            if self._back_mark is not None:
                self._back_mark.unlink(missing_ok=True)

    def take_checkpoint(self) -> bool:
        """Whether a checkpoint is asked for, which counts as heard with that."""
        with self._changed:
            asked, self._checkpoint = self._checkpoint, False
            if asked:
                try:
                    self._note()
                except StorageFailed as error:
                    # At worst there is one more checkpoint after a restart.
                    log.warning("not written down", error=str(error))
            return asked

    @property
    def idle(self) -> bool:
        """Whether nothing is asked for that is to be done between two steps."""
        with self._changed:
            return not (self._stopping or self._pausing or self._checkpoint or self._back_to)

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

    def close(self) -> bool:
        """After this nothing more can be asked of the run: it is at its end. False when something that it can do is asked for."""
        with self._changed:
            self._closed = not (self._checkpoint or self._back_to)
            return self._closed

    def open(self) -> None:
        """The run goes on after all."""
        with self._changed:
            self._closed = False

    def _refuse_at_the_end(self) -> None:
        if self._closed:
            raise FailedPrecondition("the run is at its end and saves its policy; nothing more can be asked of it")

    def _note(self) -> None:
        if self._mark is None:
            return
        asked = {"stop": self._stopping, "pause": self._pausing and not self._stopping, "checkpoint": self._checkpoint}
        words = [word for word, on in asked.items() if on]
        with storing(self._mark):
            if words:
                write_durably(self._mark, "\n".join(words) + "\n")
            else:
                self._mark.unlink(missing_ok=True)


def _read(mark: Path | None) -> str:
    return mark.read_text(encoding="utf-8") if mark is not None and mark.exists() else ""
