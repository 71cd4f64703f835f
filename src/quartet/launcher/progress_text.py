"""The progress of a run as lines of text, and the protocol of its displays."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from quartet.contract.control import ENDLESS_STEPS, Progress, RunState


class Pace:
    """Tokens per second and remaining time, by the latest steps."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=20)
        self.tokens_per_second = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """Add a committed step."""
        self._seconds.append(metrics["seconds"])
        self.tokens_per_second = metrics["response_tokens"] / max(metrics["seconds"], 1e-9)

    def time_left(self, progress: Progress) -> str:
        """Return the estimated time until the end of a run as "left [h:]mm:ss", or "" for a run without an end."""
        if progress.is_endless:
            return ""
        if not self._seconds:
            return "left --:--"
        seconds = round((progress.total_steps - progress.step) * sum(self._seconds) / len(self._seconds))
        hours, rest = divmod(seconds, 3600)
        clock = f"{rest // 60:02d}:{rest % 60:02d}"
        return f"left {hours}:{clock}" if hours else f"left {clock}"


def steps_of(step: int, total_steps: int, separator: str = "/") -> str:
    """Return a step and the number of all steps, without the latter for a run without an end."""
    return str(step) if total_steps >= ENDLESS_STEPS else f"{step}{separator}{total_steps}"


class Messages:
    """Selection of the notes, alerts and pauses of a run that have not been printed yet. ``run`` is its directory or URL."""

    def __init__(self, run: Path | str) -> None:
        self._run = run
        self._notes: tuple[int, Sequence[object]] = (0, [])
        self._alerts: tuple[int, Sequence[object]] = (0, [])
        self._paused = False

    def new_lines(self, progress: Progress) -> list[str]:
        """Return the lines to print for this progress."""
        notes = progress.notes_before, list(progress.notes)
        alerts = progress.alerts_before, [(alert.step, alert.guard) for alert in progress.alerts]
        lines = [
            note if note.startswith("warning: ") else f"note: {note}"
            for note in progress.notes[_num_seen(self._notes, notes) :]
        ]
        lines += [
            f"guard {alert.guard} ({alert.action}) after step {alert.step}: {alert.evidence}; {alert.remedy}"
            for alert in progress.alerts[_num_seen(self._alerts, alerts) :]
        ]
        paused = progress.state == RunState.PAUSED
        if paused and not self._paused:
            lines.append(
                f"paused after step {progress.step}: quartet resume {self._run} continues, "
                f"quartet stop {self._run} saves the policy and ends the run"
            )
        self._notes, self._alerts, self._paused = notes, alerts, paused
        return lines


def _num_seen(before: tuple[int, Sequence[object]], now: tuple[int, Sequence[object]]) -> int:
    """Return the number of entries of ``now`` that are also in ``before``, or 0 if another orchestrator started a new list.

    Each argument is the tail of a growing list and the number of entries before that tail.
    """
    dropped = now[0] - before[0]
    seen = before[1][max(0, dropped) :]
    return len(seen) if dropped >= 0 and now[1][: len(seen)] == seen else 0


def step_line(progress: Progress, pace: Pace) -> str:
    """Return one line about a committed step. ``progress`` has its metrics."""
    metrics = progress.metrics
    reward = f"reward {metrics['reward_mean']:+.3f}  " if "reward_mean" in metrics else ""
    return (
        f"step {steps_of(progress.step, progress.total_steps)}  {reward}"
        f"kl {metrics['kl_mean']:.3f}  entropy {metrics.get('entropy', math.nan):.2f}  eos {metrics['eos_rate']:.2f}  "
        f"{pace.tokens_per_second:.0f} tokens/s  {pace.time_left(progress)}"
    ).rstrip()


class Display(Protocol):
    """Display of the progress of a run."""

    def show(self, progress: Progress) -> None:
        """Display the current progress."""

    def print_line(self, line: str) -> None:
        """Print a message, such as the restart of a process."""

    def rewind(self, step: int) -> None:
        """Go back to ``step``, so that later steps are displayed again."""


class LineView:
    """Display that writes lines: all messages, and the committed steps."""

    def __init__(self, run: Path | str, write: Callable[[str], None], max_step_lines: int | None = None) -> None:
        """``run`` is its directory or URL. ``max_step_lines`` is about the number of steps that are shown. Defaults to all."""
        self.print_line = write
        self._messages, self._pace, self._step, self._phase = Messages(run), Pace(), 0, ""
        self._max_step_lines = max_step_lines

    def show(self, progress: Progress) -> None:
        """Write new notes, alerts and committed steps."""
        for line in self._messages.new_lines(progress):
            self.print_line(line)
        if progress.phase.startswith("tokenizing prompts") and progress.phase != self._phase:
            self.print_line(progress.phase)
        self._phase = progress.phase
        if progress.step <= self._step or not progress.metrics:
            return
        self._step = progress.step
        self._pace.add(dict(progress.metrics))
        limit = None if progress.is_endless else self._max_step_lines
        interval = max(1, math.ceil(progress.total_steps / limit)) if limit else 1
        if progress.step in (1, progress.total_steps) or not progress.step % interval:
            self.print_line(step_line(progress, self._pace))

    def rewind(self, step: int) -> None:
        """Write the steps after ``step`` again."""
        self._step = min(self._step, step)
