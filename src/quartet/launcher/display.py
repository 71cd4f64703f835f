"""The display of a run's progress, as the code that follows a run sees it."""

from __future__ import annotations

from typing import Protocol

from quartet.contract.control import Progress


class Display(Protocol):
    """Display of the progress of a run."""

    def show(self, progress: Progress) -> None:
        """Display the current progress."""

    def print_line(self, line: str) -> None:
        """Print a message, such as the restart of a process."""

    def rewind(self, step: int) -> None:
        """Go back to ``step``, so that later steps are displayed again."""
