"""`quartet helm check VALUES...`: render the chart with Helm, and check the config that its pods would load."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import typer
import yaml

from quartet.config.loading import merged_trees, parse_config, read_tree
from quartet.errors import ConfigError
from quartet.preflight.ineffective_settings import check_settings

CONFIG_FILES = ("config.yaml", "deployment.yaml")
"""Keys of the chart's ConfigMap: the config of the user, and the layer of the chart."""


def check(values: list[Path], chart: Path) -> None:
    """Print that the values are valid, after warnings. Nothing connects to a cluster, and no model or data file is read.

    ``values``: files in Helm's order. ``chart``: directory of the chart. Raises ConfigError without ``helm``, and for values that
    the chart refuses or whose config no process would load.
    """
    names = ", ".join(map(str, values))
    given: dict[str, Any] = {}
    for path in values:
        given = merged_trees(given, _values_in(path))
    if not (chart / "Chart.yaml").is_file():
        raise ConfigError(
            f"--chart {chart}: no Chart.yaml there; expected the folder of the chart, helm/quartet in a clone of Quartet"
        )
    try:
        objects = _rendered(values, chart)
    except ConfigError as error:
        if "at '/config" in str(error) and isinstance(config := given.get("config"), dict):
            # Its message says which keys there are.
            parse_config(config, f"of {names}")
        raise
    found = [data for item in objects if CONFIG_FILES[0] in (data := item.get("data") or {})]
    if len(found) != 1:
        raise ConfigError(
            f"--chart {chart}: renders no ConfigMap with {CONFIG_FILES[0]}; expected the chart of Quartet"
        )
    config, layer = (yaml.safe_load(found[0][key]) or {} for key in CONFIG_FILES)
    try:
        loaded = parse_config(merged_trees(config, layer), f"of {names}")
    except ConfigError as error:
        hint = (
            "\n  The chart gives services their devices and nodes by components.ROLE.gpus and .nodes; after a change of them, or "
            "of the estimator, run quartet plan again"
        )
        raise ConfigError(f"{error}{hint if 'services.' in str(error) else ''}") from None
    for warning in check_settings(loaded):
        typer.echo(warning)
    typer.echo(f"{names}: valid; `helm install` checks the cluster, and the pods check models and data")


def _values_in(path: Path) -> dict[str, Any]:
    """Return the values in a file. Raises ConfigError."""
    if path.is_fifo():
        raise ConfigError(f"values {path}: a pipe, which Helm cannot read again; expected a file")
    values = read_tree(path, "values", "a mapping, such as config: and components:")
    if misplaced := sorted({"run", "data", "actor", "algorithm", "rollout"} & values.keys()):
        raise ConfigError(
            f"values {path}: {misplaced[0]}: is a section of a config; put the sections of the config below config:"
        )
    return values


def _rendered(values: list[Path], chart: Path) -> list[dict[str, Any]]:
    """Return the objects of the chart. Raises ConfigError with Helm's message."""
    helm = shutil.which("helm")
    if helm is None:
        raise ConfigError("helm: no such command; expected Helm 4 on PATH; install it, as for helm install")
    options = [part for path in values for part in ("--values", str(path))]
    result = subprocess.run(
        [helm, "template", "quartet", str(chart), *options], capture_output=True, text=True, check=False
    )
    if result.returncode:
        # Helm logs lines before, such as for links in the folder of the chart.
        _, _, message = f"\n{result.stderr.strip()}".partition("\nError: ")
        message = message.partition("\n\nUse --debug")[0] or result.stderr.strip()
        raise ConfigError(re.sub(r"^execution error at \([^)]*\): ", "", message))
    return [item for item in yaml.safe_load_all(result.stdout) if item]
