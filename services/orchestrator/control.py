"""What users ask of a run while it goes on: to pause, to go on, to stop. It is heard between two steps."""

from __future__ import annotations

import threading
from pathlib import Path


class Control:
    """Thread-safe: any number of callers ask, the training thread looks."""

    def __init__(self, mark: Path | None = None) -> None:
        """``mark`` is a file that is there while the run is to wait, so that an orchestrator that is restarted waits too."""
        self._changed = threading.Condition()
        self._mark = mark
        self._stopping, self._pausing = False, mark is not None and mark.exists()

    def stop(self) -> None:
        """Stop after the step in hand."""
        with self._changed:
            self._stopping = True
            self._unmark()
            self._changed.notify_all()

    def pause(self) -> None:
        """Wait after the step in hand."""
        with self._changed:
            self._pausing = True
            if self._mark is not None:
                self._mark.touch()

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._pausing = False
            self._unmark()
            self._changed.notify_all()

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
        """Returns when the run is to go on or to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or not self._pausing)

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.unlink(missing_ok=True)
