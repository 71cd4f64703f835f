"""Progress of a run on the console: a live view in a terminal, one line per step otherwise."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quartet.contract.control import Progress as RunProgress
from quartet.launcher.progress_text import Display, LineView, Messages, Pace, steps_of
from quartet.telemetry.step_metrics import METRICS

SHOWN_METRICS = ("reward_mean", "kl_mean", "entropy", "eos_rate", "response_tokens_mean")
CURVE_STEPS = 48
"""Number of steps in a sparkline."""
_SPARK_CHARACTERS = "▁▂▃▄▅▆▇█"


def make_view(console: Console, run: Path | str) -> AbstractContextManager[Display]:
    """Return a live view for a terminal, otherwise one that prints lines. ``run`` is the directory or URL of the run."""
    if console.is_terminal:
        return LiveView(console, run)
    return nullcontext(LineView(run, lambda line: console.print(line, soft_wrap=True)))


class LiveView:
    """View with a progress bar, key metrics with sparklines, and the phase of the current step."""

    def __init__(self, console: Console, run: Path | str) -> None:
        self._console = console
        self._pace = Pace()
        self._curves: dict[str, deque[float]] = {}
        self._step = 0
        self._messages = Messages(run)
        self._progress = RunProgress("", 0, phase="")
        self._since = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[steps]}", style="progress.download"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=None, steps="", left="")
        self._live = Live(self._render(), console=console, refresh_per_second=4, transient=False)

    def show(self, progress: RunProgress) -> None:
        """Redraw the view."""
        for line in self._messages.new_lines(progress):
            self._live.console.print(Text(line, style="yellow"))
        if progress.step > self._step and progress.metrics:
            self._step = progress.step
            self._pace.add(dict(progress.metrics))
            for name in SHOWN_METRICS:
                if name in progress.metrics:
                    self._curves.setdefault(name, deque(maxlen=CURVE_STEPS)).append(progress.metrics[name])
        self._progress = progress
        self._bar.update(
            self._task,
            description=progress.run,
            completed=progress.step,
            total=None if progress.is_endless else progress.total_steps,
            steps=steps_of(progress.step, progress.total_steps),
            left=self._pace.time_left(progress),
        )
        self._live.update(self._render())

    def rewind(self, step: int) -> None:
        """Show the steps after ``step`` again."""
        self._step = min(self._step, step)

    def print_line(self, line: str) -> None:
        """Print a message above the view."""
        self._live.console.print(Text(line, style="yellow"))

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        for name, curve in self._curves.items():
            table.add_row(
                METRICS[name].title,
                f"{curve[-1]:+.3f}" if name == "reward_mean" else f"{curve[-1]:.3f}",
                _sparkline(curve),
            )
        table.add_row("tokens per second", f"{self._pace.tokens_per_second:.0f}", "")
        phase = self._progress.phase or "starting the services"
        if phase == "generate" and self._progress.num_expected:
            phase = f"generate and score: {self._progress.num_scored} of {self._progress.num_expected} scored"
        return Group(self._bar, table, Text(phase, style="dim"))

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop_task(self._task)
        self._live.__exit__(kind, error, trace)


def _sparkline(values: deque[float]) -> str:
    low, high = min(values), max(values)
    scale = (len(_SPARK_CHARACTERS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARK_CHARACTERS[round((value - low) * scale)] for value in values)
