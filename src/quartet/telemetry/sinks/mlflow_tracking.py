"""MLflow: the figures of a run as a run there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from quartet.config import MLflowConfig
from quartet.telemetry.sinks.sink import under
from quartet.types import Alert

TAG = "quartet.run"
"""Under which a run there knows the id of the run that it is of."""
_BATCH = 100
"""Parameters that a server takes at once."""
_LONGEST = 500
"""Characters of a parameter's value that every server takes."""


class MLflow:
    """A run with the run's id as a tag: one that is resumed goes on. A step that comes again is written again."""

    def __init__(self, settings: MLflowConfig, name: str, identity: str, config: Mapping[str, Any]) -> None:
        if "://" not in settings.tracking_uri:
            # A folder is what the user has asked for; the library wants to be told so a second time.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings.tracking_uri)
        experiment = self._client.get_experiment_by_name(settings.experiment)
        place = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        earlier = self._client.search_runs([place], f"tags.`{TAG}` = '{identity}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(place, run_name=name, tags={TAG: identity})
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        if not earlier:
            flat = [Param(key, str(value)[:_LONGEST]) for key, value in _flat(config).items()]
            for start in range(0, len(flat), _BATCH):
                self._client.log_batch(self._id, params=flat[start : start + _BATCH])

    def continues_from(self, step: int) -> None:
        """Nothing: figures that come again are written again, with the step that they are of."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's figures, below ``train``."""
        self._log(step, under("train", metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """An evaluation's figures, below ``evaluation``."""
        self._log(step, under("evaluation", summary))

    def alert(self, alert: Alert) -> None:
        """What a guard found, as a tag."""
        self._client.set_tag(self._id, f"alert.{alert.step}.{alert.guard}", f"{alert.evidence}. {alert.remedy}")

    def close(self) -> None:
        """Says that the run has ended."""
        self._client.set_terminated(self._id)

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in figures.items()])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
