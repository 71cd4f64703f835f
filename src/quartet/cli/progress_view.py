"""What a person sees while a run goes on: a live view in a terminal, a line for each step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quartet.v1 import orchestrator_pb2

HISTORY = 48
"""Steps that the small curves show."""
_BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """Shows progress until it is closed."""

    def show(self, progress: orchestrator_pb2.Progress) -> None:
        """One piece of news."""

    def say(self, line: str) -> None:
        """What happened to the run's processes; one line."""

    def back(self, step: int) -> None:
        """The run went back: what comes after ``step`` is new."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_view(console: Console, run: Path | str) -> View:
    """A live view where there is a terminal, else lines. ``run`` is what commands call it: its directory, or a URL."""
    return LiveView(console, run) if console.is_terminal else LineView(console, run)


class Pace:
    """Tokens per second and time left, from the steps seen so far."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=20)
        self.tokens_per_second = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """One committed step."""
        self._seconds.append(metrics["seconds"])
        self.tokens_per_second = metrics["response_tokens"] / max(metrics["seconds"], 1e-9)

    def left(self, steps: int) -> str:
        """Time that so many steps will take, as [h:]mm:ss."""
        if not self._seconds:
            return "--:--"
        seconds = round(steps * sum(self._seconds) / len(self._seconds))
        hours, rest = divmod(seconds, 3600)
        clock = f"{rest // 60:02d}:{rest % 60:02d}"
        return f"{hours}:{clock}" if hours else clock


class News:
    """What has not been said yet of a run's notes, alerts and pauses. ``run`` is its directory, or a URL."""

    def __init__(self, run: Path | str) -> None:
        self._run = run
        self._notes: tuple[int, Sequence[object]] = (0, [])
        self._alerts: tuple[int, Sequence[object]] = (0, [])
        self._paused = False

    def of(self, progress: orchestrator_pb2.Progress) -> list[str]:
        """New lines to print."""
        notes = progress.notes_before, list(progress.notes)
        alerts = progress.alerts_before, [(alert.step, alert.guard) for alert in progress.alerts]
        lines = [f"note: {note}" for note in progress.notes[_known(self._notes, notes) :]]
        lines += [
            f"guard {alert.guard} ({alert.action}) after step {alert.step}: {alert.evidence}; {alert.remedy}"
            for alert in progress.alerts[_known(self._alerts, alerts) :]
        ]
        paused = progress.state == orchestrator_pb2.RUN_STATE_PAUSED
        if paused and not self._paused:
            lines.append(
                f"paused after step {progress.step}: quartet resume {self._run} goes on, "
                f"quartet stop {self._run} saves the policy and ends"
            )
        self._notes, self._alerts, self._paused = notes, alerts, paused
        return lines


def _known(before: tuple[int, Sequence[object]], now: tuple[int, Sequence[object]]) -> int:
    """How many entries of ``now`` have been seen: none where another orchestrator has begun a new list.

    Each is the end of a list that grows, with the number of the entries before it.
    """
    dropped = now[0] - before[0]
    seen = before[1][max(0, dropped) :]
    return len(seen) if dropped >= 0 and now[1][: len(seen)] == seen else 0


class LineView:
    """One line for each step: for logs and pipes."""

    def __init__(self, console: Console, run: Path | str) -> None:
        self._console = console
        self._pace = Pace()
        self._step = 0
        self._news = News(run)

    def show(self, progress: orchestrator_pb2.Progress) -> None:
        """Prints notes, alerts and newly committed steps."""
        for line in self._news.of(progress):
            self._print(line)
        if progress.step <= self._step or not progress.metrics:
            return
        self._step = progress.step
        metrics = dict(progress.metrics)
        self._pace.add(metrics)
        self._print(
            f"step {progress.step}/{progress.total_steps}  reward {metrics['reward_mean']:+.3f}  "
            f"kl {metrics['kl_mean']:.3f}  entropy {metrics.get('entropy', math.nan):.2f}  eos {metrics['eos_rate']:.2f}  "
            f"{self._pace.tokens_per_second:.0f} tokens/s  left {self._pace.left(progress.total_steps - progress.step)}"
        )

    def back(self, step: int) -> None:
        """Steps after it are printed again."""
        self._step = min(self._step, step)

    def say(self, line: str) -> None:
        """Prints it."""
        self._print(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class LiveView:
    """A bar, the figures that matter with small curves, and what the step in hand is doing."""

    def __init__(self, console: Console, run: Path | str) -> None:
        self._console = console
        self._pace = Pace()
        self._curves: dict[str, deque[float]] = {}
        self._step = 0
        self._news = News(run)
        self._progress = orchestrator_pb2.Progress()
        self._since = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left {task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=None, left="--:--")
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=False)

    def show(self, progress: orchestrator_pb2.Progress) -> None:
        """Redraws."""
        for line in self._news.of(progress):
            self._live.console.print(Text(line, style="yellow"))
        if progress.step > self._step and progress.metrics:
            self._step = progress.step
            self._pace.add(dict(progress.metrics))
            for name in ("reward_mean", "kl_mean", "entropy", "eos_rate", "response_tokens_mean"):
                if name in progress.metrics:
                    self._curves.setdefault(name, deque(maxlen=HISTORY)).append(progress.metrics[name])
        self._progress = progress
        self._bar.update(
            self._task,
            description=progress.run,
            completed=progress.step,
            total=progress.total_steps,
            left=self._pace.left(progress.total_steps - progress.step),
        )
        self._live.update(self._render())

    def back(self, step: int) -> None:
        """Steps after it are shown again."""
        self._step = min(self._step, step)

    def say(self, line: str) -> None:
        """Prints it above the figures."""
        self._live.console.print(Text(line, style="yellow"))

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        titles = {
            "reward_mean": "reward",
            "kl_mean": "KL, nats per response",
            "entropy": "entropy, nats per token",
            "eos_rate": "finished responses",
            "response_tokens_mean": "tokens per response",
        }
        for name, curve in self._curves.items():
            table.add_row(
                titles[name], f"{curve[-1]:+.3f}" if name == "reward_mean" else f"{curve[-1]:.3f}", _spark(curve)
            )
        table.add_row("tokens per second", f"{self._pace.tokens_per_second:.0f}", "")
        phase = self._progress.phase or "starting the services"
        if phase == "generate" and self._progress.wanted:
            phase = f"generate and score: {self._progress.scored} of {self._progress.wanted} scored"
        return Group(self._bar, table, Text(phase, style="dim"))

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop_task(self._task)
        self._live.__exit__(kind, error, trace)


def _spark(values: deque[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
