"""Trackio sink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.config.telemetry import TrackioConfig
from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import with_prefix


class Trackio:
    """A Trackio run named after the run and its id. A resumed run continues it, and skips the steps that it already has.

    Trackio would show both values of a step that is logged twice.
    """

    def __init__(self, settings: TrackioConfig, name: str, identity: str, config: Mapping[str, Any]) -> None:
        import trackio

        # Trackio finds the run to resume by its name, so the name has the id. Machine metrics would repeat Prometheus's.
        self._run: Any = trackio.init(
            project=settings.project,
            name=f"{name}-{identity}",
            group=name,
            space_id=settings.space_id,
            private=True,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Trackio has looked it up, in the folder or on the server, and has no public name for it.
        self._next_step: int = self._run._next_step

    def continues_from(self, step: int) -> None:
        """Do nothing: steps that Trackio already has are skipped."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics below ``train``."""
        self._log(step, with_prefix("train", metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Log an evaluation's metrics below ``evaluation``."""
        self._log(step, with_prefix("evaluation", summary))

    def alert(self, alert: Alert) -> None:
        """Send an alert."""
        if alert.step >= self._next_step:
            self._run.alert(title=alert.guard, text=f"{alert.evidence}. {alert.remedy}", step=alert.step)

    def close(self) -> None:
        """Send the remaining metrics."""
        self._run.finish()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step >= self._next_step:
            self._run.log(dict(metrics), step=step)
