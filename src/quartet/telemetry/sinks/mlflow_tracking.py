"""MLflow sink."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from quartet.config.section import flattened
from quartet.config.telemetry import MLflowConfig
from quartet.contract.control import Alert
from quartet.telemetry.sinks.sink import with_prefix

TAG = "quartet.run"
"""Tag of an MLflow run that contains the id of the Quartet run."""
_MAX_PARAMETERS = 100
"""Maximum number of parameters in one request."""
_MAX_VALUE_LENGTH = 500
"""Maximum length of a parameter's value that every server accepts."""


class MLflow:
    """An MLflow run with the run's id as a tag. A resumed run continues it. Recomputed steps are written again."""

    def __init__(self, settings: MLflowConfig, name: str, identity: str, config: Mapping[str, Any]) -> None:
        if "://" not in settings.tracking_uri:
            # The user has configured a folder. The library requires a second confirmation.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings.tracking_uri)
        experiment = self._client.get_experiment_by_name(settings.experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        earlier = self._client.search_runs([experiment_id], f"tags.`{TAG}` = '{identity}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(experiment_id, run_name=name, tags={TAG: identity})
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        if not earlier:
            flat = [Param(key, str(value)[:_MAX_VALUE_LENGTH]) for key, value in flattened(config).items()]
            for start in range(0, len(flat), _MAX_PARAMETERS):
                self._client.log_batch(self._id, params=flat[start : start + _MAX_PARAMETERS])

    def continues_from(self, step: int) -> None:
        """Do nothing: metrics of recomputed steps are written again with their step."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics below ``train``."""
        self._log(step, with_prefix("train", metrics))

    def evaluation(self, step: int, summary: Mapping[str, float]) -> None:
        """Log an evaluation's metrics below ``evaluation``."""
        self._log(step, with_prefix("evaluation", summary))

    def alert(self, alert: Alert) -> None:
        """Set a tag for the alert."""
        self._client.set_tag(self._id, f"alert.{alert.step}.{alert.guard}", f"{alert.evidence}. {alert.remedy}")

    def close(self) -> None:
        """Mark the MLflow run as ended."""
        self._client.set_terminated(self._id)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in metrics.items()])
