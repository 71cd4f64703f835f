"""The sinks that a run's config asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import yaml

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.telemetry.sinks.background import Sinks
from quartet.telemetry.sinks.sink import Sink


def check_sinks(config: Config) -> None:
    """Raises ConfigError when a sink's package is not installed."""
    wanted = {"wandb": config.telemetry.wandb, "mlflow": config.telemetry.mlflow}
    for package, settings in wanted.items():
        if settings is not None and find_spec(package) is None:
            raise ConfigError(
                f"telemetry.{package}: the package {package} is not installed; "
                f"pip install 'quartet-rlhf[{package}]', or leave telemetry.{package} out"
            )


def open_sinks(config: Config, files: RunFiles, identity: str, note: Callable[[str], None]) -> Sinks:
    """Connects to the sinks that ``config`` asks for. ``identity`` is the run's id; ``note`` hears what a user should know."""
    telemetry, name = config.telemetry, config.run.name
    openers: dict[str, Callable[[], Sink]] = {}
    # Each package is loaded by its own thread, and only where it is wanted.
    if telemetry.tensorboard:

        def open_tensorboard() -> Sink:
            from quartet.telemetry.sinks.tensorboard import TensorBoard

            return TensorBoard(files.tensorboard)

        openers["TensorBoard"] = open_tensorboard
    if (wandb := telemetry.wandb) is not None:

        def open_wandb() -> Sink:
            from quartet.telemetry.sinks.weights_and_biases import WeightsAndBiases

            return WeightsAndBiases(wandb, name, identity, _sent(config), files.logs)

        openers["Weights & Biases"] = open_wandb
    if (mlflow := telemetry.mlflow) is not None:

        def open_mlflow() -> Sink:
            from quartet.telemetry.sinks.mlflow_tracking import MLflow

            return MLflow(mlflow, name, identity, _sent(config))

        openers["MLflow"] = open_mlflow
    return Sinks(openers, note)


def _sent(config: Config) -> dict[str, Any]:
    """The settings without passwords: the buffer's is left out by the config, addresses of sinks may hold others."""
    tree: dict[str, Any] = yaml.safe_load(config.to_yaml())
    del tree["telemetry"]
    return tree
