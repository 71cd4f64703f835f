"""The progress board: the training thread writes it, any number of watchers read it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import Protocol

from quartet.types import Alert

HISTORY = 256
"""Committed steps, notes and alerts that are kept, for watchers who come late too. The run's files and log have all of them."""


class RunState(StrEnum):
    """Where a run stands."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    PAUSED = "paused"
    RECOVERING = "recovering"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


@dataclass(slots=True)
class Progress:
    """A run's progress; ``metrics`` are the last committed step's."""

    run: str
    total_steps: int
    state: RunState = RunState.STARTING
    step: int = 0
    phase: str = "starting"
    scored: int = 0
    wanted: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    exit_code: int = 0
    notes: list[str] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    recoveries: int = 0
    notes_before: int = 0
    """Notes that were dropped, all before the first of ``notes``."""
    alerts_before: int = 0
    """The same of ``alerts``."""


class BoardObserver(Protocol):
    """Whoever counts."""

    def step(self, metrics: dict[str, float]) -> None:
        """A step was committed."""

    def alert(self, alert: Alert) -> None:
        """A guard found something."""


class ProgressBoard:
    """Thread-safe: one writer, many watchers."""

    def __init__(self, run: str, total_steps: int) -> None:
        self._progress = Progress(run, total_steps)
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._committed = 0
        self._changes = 0
        self._changed = threading.Condition()
        self.observer: BoardObserver | None = None
        """Hears of what comes together, from the writer's thread."""

    def update(self, **values: object) -> None:
        """Sets fields of the progress and wakes the watchers."""
        with self._changed:
            for name, value in values.items():
                setattr(self._progress, name, value)
            self._changes += 1
            self._changed.notify_all()

    def note(self, text: str) -> None:
        """Adds something that a user should know."""
        with self._changed:
            self._append("notes", text)

    def alert(self, alert: Alert) -> None:
        """Adds what a guard found."""
        with self._changed:
            self._append("alerts", alert)
        if self.observer is not None:
            self.observer.alert(alert)

    def recovering(self, cause: str) -> None:
        """Notes a failure that the run goes back from."""
        with self._changed:
            self.update(state=RunState.RECOVERING, recoveries=self._progress.recoveries + 1)
            self._append("notes", f"recovering: {cause}")

    def _append(self, name: str, entry: object) -> None:
        """One more entry of a list, of which the last HISTORY are kept."""
        entries = [*getattr(self._progress, name), entry]
        dropped = max(0, len(entries) - HISTORY)
        before = getattr(self._progress, f"{name}_before") + dropped
        self.update(**{name: entries[dropped:], f"{name}_before": before})

    def show_scored(self, scored: int) -> None:
        """Notes how many trajectories of the step in hand have been scored."""
        with self._changed:
            if self._progress.scored != scored:
                self.update(scored=scored)

    def commit(self, step: int, metrics: dict[str, float]) -> None:
        """Notes a committed step."""
        with self._changed:
            self._history.append(metrics)
            self._committed += 1
            self.update(step=step, metrics=metrics)
        if self.observer is not None:
            self.observer.step(metrics)

    def current(self) -> Progress:
        """A copy of the progress."""
        with self._changed:
            return deepcopy(self._progress)

    def watch(self, after_step: int, poll: float = 1.0) -> Iterator[Progress | None]:
        """Steps after ``after_step``, of the last HISTORY, and every change, until the run ends; None after ``poll`` seconds."""
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
                        # A watcher stops listening at the end, and more follows.
                        news[-1].state = RunState.TRAINING
                    sent = self._committed
                    news.append(deepcopy(self._progress))
                seen = self._changes
            if not news:
                yield None
            yield from news
            if news and news[-1].state.ended:
                return
