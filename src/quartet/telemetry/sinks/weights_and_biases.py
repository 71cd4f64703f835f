"""Weights & Biases: the figures of a run as a run there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.config import WandbConfig
from quartet.telemetry.sinks.sink import under
from quartet.types import Alert


class WeightsAndBiases:
    """A run of the same id there: one that is resumed goes on. Figures are held against ``step``, which may go back."""

    def __init__(
        self, settings: WandbConfig, name: str, identity: str, config: Mapping[str, Any], folder: Path
    ) -> None:
        """``folder`` takes the library's own files."""
        import wandb

        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=name,
            id=identity,
            resume="allow",
            config=dict(config),
            dir=folder,
            # Its own look at the console and at the code would show what a user did not ask to send.
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def continues_from(self, step: int) -> None:
        """Nothing: figures that come again are logged again, with the step that they are of."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's figures, below ``train``."""
        self._run.log({"step": step, **under("train", metrics)})

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """An evaluation's figures, below ``evaluation``."""
        self._run.log({"step": step, **under("evaluation", summary)})

    def alert(self, alert: Alert) -> None:
        """What a guard found, as an alert there."""
        self._run.alert(title=f"step {alert.step}: {alert.guard}", text=f"{alert.evidence}. {alert.remedy}")

    def close(self) -> None:
        """Sends what has not been sent yet."""
        self._run.finish()
