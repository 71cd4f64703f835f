"""SwanLab sink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.config.telemetry import SwanLabConfig
from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import with_prefix


class SwanLab:
    """A SwanLab run with the same id. A resumed run continues it. Recomputed steps are logged again with their step."""

    def __init__(
        self, settings: SwanLabConfig, name: str, identity: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        """``folder`` holds the files of the library."""
        import swanlab

        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            project=settings.project,
            workspace=settings.workspace,
            name=name,
            id=identity,
            resume="allow",
            config=dict(config),
            log_dir=str(folder / "swanlog"),
            # Capturing the console and the machine would upload data that the user did not choose to send.
            settings=swanlab.Settings(
                interactive=False,
                terminal={"proxy_type": "none"},
                probe=dict.fromkeys(
                    ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor"), False
                ),
            ),
        )

    def continues_from(self, step: int) -> None:
        """Do nothing: metrics of recomputed steps are logged again with their step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics below ``train``."""
        self._run.log(with_prefix("train", metrics), step=step)

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Log an evaluation's metrics below ``evaluation``."""
        self._run.log(with_prefix("evaluation", summary), step=step)

    def alert(self, alert: Alert) -> None:
        """Log an alert as text."""
        text = f"{alert.evidence}. {alert.remedy}"
        self._run.log_text(key=f"alerts/{alert.guard}", data=text, step=alert.step)

    def close(self) -> None:
        """Send the remaining metrics."""
        self._run.finish()
