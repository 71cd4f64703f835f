"""Check and open the sinks that a config enables. The check imports no libraries besides the config's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import yaml

from quartet.config.root import Config
from quartet.config.supervised import StageConfig
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles

if TYPE_CHECKING:
    from quartet.telemetry.sinks.background import Sinks
    from quartet.telemetry.sinks.sink import Sink


def check_sinks(config: Config | StageConfig) -> None:
    """Raise ConfigError if packages of enabled sinks are not installed."""
    telemetry = config.telemetry
    packages = {
        "wandb": telemetry.wandb,
        "mlflow": telemetry.mlflow,
        "trackio": telemetry.trackio,
        "swanlab": telemetry.swanlab,
    }
    missing = [
        f"telemetry.{package}: the package {package} is not installed; "
        f"pip install 'quartet-rlhf[{package}]', or remove telemetry.{package}"
        for package, settings in packages.items()
        if settings is not None and find_spec(package) is None
    ]
    if missing:
        raise ConfigError("\n  ".join(missing))


def open_sinks(config: Config | StageConfig, files: RunFiles, identity: str, note: Callable[[str], None]) -> Sinks:
    """Connect to the sinks that ``config`` enables. ``identity`` is the run's id; ``note`` gets messages for the user."""
    from quartet.telemetry.sinks.background import Sinks

    telemetry, name = config.telemetry, config.run.name
    openers: dict[str, Callable[[], Sink]] = {}
    # The background thread imports a package, and only if its sink is enabled.
    if telemetry.tensorboard:

        def open_tensorboard() -> Sink:
            from quartet.telemetry.sinks.tensorboard import TensorBoard

            return TensorBoard(files.tensorboard)

        openers["TensorBoard"] = open_tensorboard
    if (wandb := telemetry.wandb) is not None:

        def open_wandb() -> Sink:
            from quartet.telemetry.sinks.weights_and_biases import WeightsAndBiases

            return WeightsAndBiases(wandb, name, identity, _config_to_send(config), files.logs)

        openers["Weights & Biases"] = open_wandb
    if (mlflow := telemetry.mlflow) is not None:

        def open_mlflow() -> Sink:
            from quartet.telemetry.sinks.mlflow_tracking import MLflow

            return MLflow(mlflow, name, identity, _config_to_send(config))

        openers["MLflow"] = open_mlflow
    if (trackio := telemetry.trackio) is not None:

        def open_trackio() -> Sink:
            from quartet.telemetry.sinks.trackio_tracking import Trackio

            return Trackio(trackio, name, identity, _config_to_send(config))

        openers["Trackio"] = open_trackio
    if (swanlab := telemetry.swanlab) is not None:

        def open_swanlab() -> Sink:
            from quartet.telemetry.sinks.swanlab_tracking import SwanLab

            return SwanLab(swanlab, name, identity, _config_to_send(config), files.logs)

        openers["SwanLab"] = open_swanlab
    return Sinks(openers, note)


def _config_to_send(config: Config | StageConfig) -> dict[str, Any]:
    """Return the settings without passwords. The config hides the buffer's; URLs of sinks may contain others."""
    tree: dict[str, Any] = yaml.safe_load(config.to_yaml())
    del tree["telemetry"]
    return tree
