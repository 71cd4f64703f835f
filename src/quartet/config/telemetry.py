"""Settings of telemetry: files for the dashboard, trackers and traces."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator, Field

from quartet.config.section import Section, WholeNumber


def _without_password(value: str) -> str:
    # An unescaped password may contain "/". Digits after a colon, up to the path, may also be a port.
    in_user = re.search(r"://([^/]*@|[^/:]*:(?!\d+/).*@)", value, re.DOTALL)
    if in_user or re.search(r"[?&#][^=&]*password[^=&]*=", unquote(value), re.IGNORECASE):
        raise ValueError(
            "expected an address without user and password; give them in the environment, as OTEL_EXPORTER_OTLP_HEADERS, or as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return value


WithoutPassword = Annotated[str, AfterValidator(_without_password)]


class WandbConfig(Section):
    """Export of metrics to Weights & Biases. Needs the extra quartet-rlhf[wandb]."""

    project: str
    """Project to log the run to."""
    entity: str | None = None
    """User or team that owns the project. Null: the default entity of the account."""


class MLflowConfig(Section):
    """Export of metrics to MLflow. Needs the extra quartet-rlhf[mlflow]."""

    tracking_uri: WithoutPassword
    """Address of the tracking server, or a folder."""
    experiment: str = "quartet"
    """Experiment to log the run to."""


class TrackioConfig(Section):
    """Export of metrics to Trackio. Needs the extra quartet-rlhf[trackio]."""

    project: str
    """Project to log the run to."""
    space_id: str | None = None
    """Space on Hugging Face, USER/NAME, that gets the metrics; created as a private one if it does not exist. Null: the server in
    TRACKIO_SERVER_URL, or else the folder in TRACKIO_DIR."""


class SwanLabConfig(Section):
    """Export of metrics to SwanLab. Needs the extra quartet-rlhf[swanlab]."""

    project: str
    """Project to log the run to."""
    workspace: str | None = None
    """User or organization that owns the project. Null: the default of the account."""


class SinksConfig(Section):
    """Trackers that get the metrics besides the run's files. A failing one never fails the run."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: WandbConfig | None = None
    """Send metrics to Weights & Biases. Null disables it."""
    mlflow: MLflowConfig | None = None
    """Send metrics to MLflow. Null disables it."""
    trackio: TrackioConfig | None = None
    """Send metrics to Trackio. Null disables it."""
    swanlab: SwanLabConfig | None = None
    """Send metrics to SwanLab. Null disables it."""


class TelemetryConfig(SinksConfig):
    """Records in addition to the files that a run needs to resume. A failing tracker never fails the run."""

    tokens_every_steps: WholeNumber = 1
    """Record the trajectories of every N-th step token by token, for the trajectory inspector. 0 disables it."""
    tokens_keep_steps: WholeNumber = 0
    """Number of latest recorded steps whose token files are kept. 0 keeps all."""
    timeline: bool = True
    """Record when each service was busy in every step."""
    otlp_endpoint: Annotated[WithoutPassword, Field(pattern=r"^https?://.+")] | None = None
    """OTLP/HTTP endpoint that receives one trace per step, such as http://127.0.0.1:4318. Null disables traces."""
