"""`quartet watch RUN`: show the progress of an active run, as `quartet train` does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quartet.cli.console import make_console
from quartet.cli.progress_view import CURVE_STEPS, make_view
from quartet.contract.control import Progress, RunState
from quartet.errors import ServiceFailed, ServiceUnavailable
from quartet.gateway.client import Api, Event, Target, connect
from quartet.launcher.progress_text import Display

console = make_console()
RECONNECT_SECONDS = 1.0
"""Pause between attempts to reconnect to the event stream."""
GATEWAY_RESTART_SECONDS = 30.0
"""Time that a gateway that has responded before may be unreachable. A gateway that crashes is restarted."""

END_STATES = ("finished", "stopped", "failed")
"""States after which no more events follow."""


def watch(target: Target) -> None:
    """Show the run until it ends. Raises ServiceFailed if it fails."""
    with connect(target) as api:
        name = api.run
        # A gateway with several runs reports an ended run as idle. The gateway of a run reports idle while services start.
        end_states = END_STATES if api.belongs_to_the_run else (*END_STATES, "idle")
        with make_view(console, target.given) as view:
            display = RunDisplay(name, view)
            if console.is_terminal:
                display.add_committed_steps(_latest_steps(api))
            state = _follow(api, display, end_states)
    console.print(f"{name}: {_END_MESSAGES[state]}", soft_wrap=True)


_END_MESSAGES = {
    "finished": "finished",
    "stopped": "stopped before its last step",
    "idle": "is not active",
    "": "has ended",
}


def _follow(api: Api, display: RunDisplay, end_states: Sequence[str]) -> str:
    """Show events until the run ends, and return its final state. The state is empty if the run ended without one."""
    try:
        for event in _events(api):
            display.update(event)
            if display.state == "failed":
                raise ServiceFailed(display.error or "the run failed; see its logs")
            if display.state in end_states and display.complete:
                return display.state
    except ServiceUnavailable:
        # The gateway of a run removes its file when the run has ended.
        files = api.target.files
        if files is None or files.gateway.exists():
            raise
        if outcome := files.read_outcome():
            outcome.raise_failure()
            return outcome.state.value
    return ""


def _events(api: Api) -> Iterator[Event]:
    """Yield the events, and reconnect after the last one if the connection breaks. Raises ServiceUnavailable if that fails."""
    last: str | None = None
    last_seen = time.monotonic()
    while True:
        try:
            for event in api.events(last):
                last, last_seen = event.id or last, time.monotonic()
                yield event
        except ServiceUnavailable:
            files = api.target.files
            ended = files is not None and not files.gateway.exists() and not files.services.exists()
            if last is None or ended or time.monotonic() - last_seen > GATEWAY_RESTART_SECONDS:
                raise
        time.sleep(RECONNECT_SECONDS)


def _latest_steps(api: Api) -> list[dict[str, Any]]:
    """Return the metrics of the latest steps, for the start of the curves."""
    last = api.get()["step"]
    curves = api.get("/metrics", first=max(1, last - CURVE_STEPS + 1), points=CURVE_STEPS)["curves"]
    steps: dict[int, dict[str, Any]] = {}
    for name, curve in curves.items():
        for step, value in zip(curve["steps"], curve["mean"], strict=True):
            if value is not None:
                steps.setdefault(step, {})[name] = value
    return [{**steps[step], "step": step} for step in sorted(steps)]


class RunDisplay:
    """Converter from the events of a run to updates of a view."""

    def __init__(self, run: str, view: Display) -> None:
        self._view = view
        self._progress = Progress(run, 0, phase="")
        self._notes: list[str] = []
        self._committed = 0
        self.state, self.error = "", ""
        self._reached: int | None = None

    @property
    def complete(self) -> bool:
        """Return whether every step since the first event has been shown."""
        return self._reached is not None and self._committed >= self._reached

    def add_committed_steps(self, steps: list[dict[str, Any]]) -> None:
        """Show steps that were committed before the first event."""
        for metrics in steps:
            self._step(metrics)

    def update(self, event: Event) -> None:
        """Show one event. Unknown kinds of events, such as those of a newer gateway, are ignored."""
        data = event.data
        if event.kind == "progress":
            self._update_progress(data)
        elif event.kind == "step":
            self._step(data["metrics"])
        elif event.kind == "rewind":
            self._committed = self._progress.step = data["step"]
            self._view.rewind(data["step"])
            self._view.print_line(
                f"goes back to step {data['step']}" if data["step"] else "starts again from the first step"
            )
        elif event.kind in _LINES:
            self._view.print_line(_LINES[event.kind](data))

    def _update_progress(self, data: Mapping[str, Any]) -> None:
        if self._reached is None:
            # The first event describes the present. Earlier steps are not sent.
            self._committed = max(self._committed, data["step"])
        self.state, self.error, self._reached = data["state"], data["error"], data["step"]
        for note in _new(self._notes, data["notes"]):
            self._view.print_line(f"note: {note}")
        self._notes = data["notes"]
        progress = self._progress
        progress.state = RunState(self.state) if self.state in set(RunState) else RunState.STARTING
        progress.phase, progress.total_steps = data["phase"] or self.state, data["total_steps"]
        progress.num_scored, progress.num_expected = data["num_scored"], data["num_expected"]
        progress.step = max(self._committed, data["step"])
        # Each step has a separate event with its metrics.
        progress.metrics.clear()
        self._view.show(progress)

    def _step(self, metrics: Mapping[str, Any]) -> None:
        self._committed = self._progress.step = int(metrics["step"])
        self._progress.metrics.clear()
        self._progress.metrics.update(
            {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        )
        self._progress.total_steps = max(self._progress.total_steps, self._committed)
        self._view.show(self._progress)


def _new(before: list[str], now: list[str]) -> list[str]:
    """Return the entries of ``now`` that are not in ``before``. Each is the tail of one growing list."""
    for dropped in range(len(before) + 1):
        known = before[dropped:]
        if now[: len(known)] == known:
            return now[len(known) :]
    return now


_LINES = {
    "alert": lambda data: (
        f"guard {data['guard']} ({data['action']}) after step {data['step']}: {data['evidence']}; {data['remedy']}"
    ),
    "change": lambda data: (
        f"{data['setting']} {data['before']:g} -> {data['after']:g} from step {data['step']} on, by {data['user']}"
    ),
    "evaluation": lambda data: f"evaluation after step {data['step']}: {_metrics_text(data['metrics'])}",
    "checkpoint": lambda data: f"checkpoint of step {data['step']}",
}


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('eval_')} {value:.3g}"
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float)
    )
