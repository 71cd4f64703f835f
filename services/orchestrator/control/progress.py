"""Progress of a run: the training thread writes it, any number of watchers read it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from typing import Protocol

from quartet.contract.control import Alert, Progress, RunState
from quartet.run_directory.run_files import RunOutcome

HISTORY = 256
"""Committed steps, notes and alerts kept in memory for late watchers. The run's files and log have all of them."""


class BoardObserver(Protocol):
    """Receiver of committed steps and alerts."""

    def step(self, metrics: dict[str, float]) -> None:
        """Record a committed step."""

    def alert(self, alert: Alert) -> None:
        """Record an alert."""


class ProgressBoard:
    """Thread-safe progress of one run: one writer, many watchers."""

    def __init__(self, run: str, total_steps: int) -> None:
        self._progress = Progress(run, total_steps)
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._committed = 0
        self._changes = 0
        self._changed = threading.Condition()
        self.observer: BoardObserver | None = None
        """Called on the writer's thread for each committed step and alert."""

    def update(self, **values: object) -> None:
        """Set fields of the progress and wake the watchers."""
        with self._changed:
            for name, value in values.items():
                setattr(self._progress, name, value)
            self._changes += 1
            self._changed.notify_all()

    def end(self, outcome: RunOutcome) -> None:
        """End the progress of the run."""
        phase = "failed" if outcome.state is RunState.FAILED else "done"
        self.update(state=outcome.state, phase=phase, error=outcome.message, exit_code=outcome.exit_status)

    def note(self, text: str) -> None:
        """Add a note for the user."""
        with self._changed:
            self._append("notes", text)

    def alert(self, alert: Alert) -> None:
        """Add an alert."""
        with self._changed:
            self._append("alerts", alert)
        if self.observer is not None:
            self.observer.alert(alert)

    def recovering(self, cause: str) -> None:
        """Record a failure that the run recovers from."""
        with self._changed:
            self.update(state=RunState.RECOVERING, recoveries=self._progress.recoveries + 1)
            self._append("notes", f"recovering: {cause}")

    def _append(self, name: str, entry: object) -> None:
        """Append to a list that keeps its last HISTORY entries."""
        entries = [*getattr(self._progress, name), entry]
        dropped = max(0, len(entries) - HISTORY)
        before = getattr(self._progress, f"{name}_before") + dropped
        self.update(**{name: entries[dropped:], f"{name}_before": before})

    def show_scored(self, scored: int) -> None:
        """Set the number of trajectories of the current step that have been scored."""
        with self._changed:
            if self._progress.num_scored != scored:
                self.update(num_scored=scored)

    def commit(self, step: int, metrics: dict[str, float]) -> None:
        """Record a committed step."""
        with self._changed:
            self._history.append(metrics)
            self._committed += 1
            self.update(step=step, metrics=metrics)
        if self.observer is not None:
            self.observer.step(metrics)

    def current(self) -> Progress:
        """Return a copy of the progress."""
        with self._changed:
            return deepcopy(self._progress)

    def watch(self, after_step: int, poll: float = 1.0) -> Iterator[Progress | None]:
        """Yield the progress of each step after ``after_step`` and of each change, until the run ends.

        At most the last HISTORY steps are repeated. Yields None if nothing changes for ``poll`` seconds.
        """
        sent, seen = 0, -1
        while True:
            with self._changed:
                if seen == self._changes:
                    self._changed.wait(poll)
                news: list[Progress] = []
                if seen != self._changes:
                    unsent = min(self._committed - sent, len(self._history))
                    for metrics in islice(self._history, len(self._history) - unsent, None):
                        if metrics["step"] <= after_step:
                            continue
                        news.append(deepcopy(self._progress))
                        news[-1].step, news[-1].metrics = int(metrics["step"]), metrics
                        # A final state would end the watch, and more entries follow.
                        news[-1].state = RunState.TRAINING
                    sent = self._committed
                    news.append(deepcopy(self._progress))
                seen = self._changes
            if not news:
                yield None
            yield from news
            if news and news[-1].state.ended:
                return
