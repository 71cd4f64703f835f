"""Actions on the alerts of the guards: report them, and pause or stop the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import structlog

from quartet.contract.control import Alert
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.telemetry.run_outputs import RunTelemetry

log = structlog.get_logger()


class AlertHandler:
    """Handler of alerts: reports them, carries out their actions, and remembers which one stopped the run."""

    def __init__(self, files: RunFiles, board: ProgressBoard, telemetry: RunTelemetry, control: RunControl) -> None:
        self._files, self._board, self._telemetry, self._control = files, board, telemetry, control
        self.stopped_by: Alert | None = None
        """The first alert whose action is to stop the run."""

    def apply(self, alerts: Sequence[Alert]) -> None:
        """Carry out the action of each alert, and record the alert."""
        for alert in alerts:
            log.warning("guard alert", **asdict(alert))
            # Before the alert is written: a written alert counts as applied.
            if alert.action == "pause":
                self._control.pause()
            if alert.action == "stop":
                self.stopped_by = self.stopped_by or alert
                self._control.stop()
            self._files.append_alert(alert)
            self._board.alert(alert)
            self._telemetry.alert(alert)

    def resume(self, step: int, alerts: Sequence[Alert]) -> None:
        """Apply those ``alerts`` of the last committed ``step`` that an interrupted process has not applied."""
        written = self._files.read_alerts(step)
        self.apply([alert for alert in alerts if asdict(alert) not in written])
        if self._control.stopping:
            self.stopped_by = next((alert for alert in alerts if alert.action == "stop"), None)
