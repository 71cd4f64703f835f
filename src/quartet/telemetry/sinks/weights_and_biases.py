"""Weights & Biases sink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.config.telemetry import WandbConfig
from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import with_prefix


class WeightsAndBiases:
    """A Weights & Biases run with the same id. A resumed run continues it. Plots are over ``step``, which may go back."""

    def __init__(
        self, settings: WandbConfig, name: str, identity: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        """``folder`` holds the files of the library."""
        import wandb

        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=name,
            id=identity,
            resume="allow",
            config=dict(config),
            dir=folder,
            # Capturing the console and the code would upload data that the user did not choose to send.
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def continues_from(self, step: int) -> None:
        """Do nothing: metrics of recomputed steps are logged again with their step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics below ``train``."""
        self._run.log({"step": step, **with_prefix("train", metrics)})

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Log an evaluation's metrics below ``evaluation``."""
        self._run.log({"step": step, **with_prefix("evaluation", summary)})

    def alert(self, alert: Alert) -> None:
        """Send an alert."""
        self._run.alert(title=f"step {alert.step}: {alert.guard}", text=f"{alert.evidence}. {alert.remedy}")

    def close(self) -> None:
        """Send the remaining metrics."""
        self._run.finish()
