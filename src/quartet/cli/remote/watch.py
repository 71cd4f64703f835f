"""`quartet watch RUN`: a run that goes on elsewhere, shown as `quartet train` shows its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from quartet.cli.progress_view import HISTORY, View, make_view
from quartet.cli.remote.gateway_client import Api, Event, Target, asking
from quartet.errors import ServiceFailed, ServiceUnavailable
from quartet.v1 import orchestrator_pb2

console = Console()
RECONNECT = 1.0
"""Seconds between attempts to hear the news again."""
PATIENCE = 30.0
"""Seconds for which a gateway that was there may be away: it is started again where it ends."""

_STATES = {
    "starting": orchestrator_pb2.RUN_STATE_STARTING,
    "training": orchestrator_pb2.RUN_STATE_TRAINING,
    "paused": orchestrator_pb2.RUN_STATE_PAUSED,
    "recovering": orchestrator_pb2.RUN_STATE_RECOVERING,
    "finished": orchestrator_pb2.RUN_STATE_FINISHED,
    "stopped": orchestrator_pb2.RUN_STATE_STOPPED,
    "failed": orchestrator_pb2.RUN_STATE_FAILED,
}
ENDS = ("finished", "stopped", "failed")
"""States after which no more news come."""


def watch(target: Target) -> None:
    """Shows the run until it ends. Raises ServiceFailed where it failed."""
    with asking(target) as api:
        name = api.run
        # A run whose services are being started is not going on either.
        ends = ENDS if api.goes_with_the_run else (*ENDS, "idle")
        with make_view(console, target.given) as view:
            shown = Shown(name, view)
            if console.is_terminal:
                shown.catch_up(_latest(api))
            state = _follow(api, shown, ends)
    console.print(f"{name}: {_ENDINGS[state]}", highlight=False, soft_wrap=True, markup=False)


_ENDINGS = {
    "finished": "finished",
    "stopped": "stopped before its last step",
    "idle": "is not going on",
    "": "has ended",
}


def _follow(api: Api, shown: Shown, ends: Sequence[str]) -> str:
    """Shows news until the run ends: the state in which it did, empty where its gateway ended with it."""
    try:
        for event in _news(api):
            shown.take(event)
            if shown.state == "failed":
                raise ServiceFailed(shown.error or "the run failed; see its logs")
            if shown.state in ends and shown.complete:
                return shown.state
    except ServiceUnavailable:
        # A gateway that goes with a run takes its file away when the run has ended.
        files = api.target.files
        if files is None or files.gateway.exists():
            raise
    return ""


def _news(api: Api) -> Iterator[Event]:
    """The events, taken up again after the last one where the connection breaks. Raises ServiceUnavailable when it stays so."""
    last: str | None = None
    heard = time.monotonic()
    while True:
        try:
            for event in api.events(last):
                last, heard = event.id or last, time.monotonic()
                yield event
        except ServiceUnavailable:
            files = api.target.files
            ended = files is not None and not files.gateway.exists() and not files.services.exists()
            if last is None or ended or time.monotonic() - heard > PATIENCE:
                raise
        time.sleep(RECONNECT)


def _latest(api: Api) -> list[dict[str, Any]]:
    """The metrics of the newest steps, for the curves to begin with."""
    last = api.get()["step"]
    curves = api.get("/metrics", first=max(1, last - HISTORY + 1), points=HISTORY)["curves"]
    steps: dict[int, dict[str, Any]] = {}
    for name, curve in curves.items():
        for step, value in zip(curve["steps"], curve["mean"], strict=True):
            if value is not None:
                steps.setdefault(step, {})[name] = value
    return [{**steps[step], "step": step} for step in sorted(steps)]


class Shown:
    """What is known of the run from its events, as a view takes it."""

    def __init__(self, run: str, view: View) -> None:
        self._view = view
        self._progress = orchestrator_pb2.Progress(run=run)
        self._notes: list[str] = []
        self._committed = 0
        self.state, self.error = "", ""
        self._reached: int | None = None

    @property
    def complete(self) -> bool:
        """Whether every step that the run has taken since the first news is shown."""
        return self._reached is not None and self._committed >= self._reached

    def catch_up(self, steps: list[dict[str, Any]]) -> None:
        """Steps that were committed before."""
        for metrics in steps:
            self._step(metrics)

    def take(self, event: Event) -> None:
        """One event; what is of no interest here, or of a newer gateway, is passed over."""
        data = event.data
        if event.kind == "progress":
            self._take_progress(data)
        elif event.kind == "step":
            self._step(data["metrics"])
        elif event.kind == "rewind":
            self._committed = self._progress.step = data["step"]
            self._view.back(data["step"])
            self._view.say(f"goes back to step {data['step']}" if data["step"] else "its steps are told anew")
        elif event.kind in _LINES:
            self._view.say(_LINES[event.kind](data))

    def _take_progress(self, data: Mapping[str, Any]) -> None:
        if self._reached is None:
            # News begin with the present: what was before is not told.
            self._committed = max(self._committed, data["step"])
        self.state, self.error, self._reached = data["state"], data["error"], data["step"]
        for note in _new(self._notes, data["notes"]):
            self._view.say(f"note: {note}")
        self._notes = data["notes"]
        progress = self._progress
        progress.state = _STATES.get(self.state, orchestrator_pb2.RUN_STATE_UNSPECIFIED)
        progress.phase, progress.total_steps = data["phase"] or self.state, data["total_steps"]
        progress.scored, progress.wanted = data["scored"], data["wanted"]
        progress.step = max(self._committed, data["step"])
        # The figures of a step come with an event of their own.
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
    """What ``now`` adds to ``before``: each is the end of a list that grows."""
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
    "evaluation": lambda data: f"evaluation after step {data['step']}: {_figures(data['metrics'])}",
    "checkpoint": lambda data: f"checkpoint of step {data['step']}",
}


def _figures(metrics: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name.removeprefix('eval_')} {value:.3g}"
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float)
    )
