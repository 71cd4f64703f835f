"""``quartet.load_config``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quartet.config.loading import config_of, copy_sections
from quartet.config.loading import load_config as load_file
from quartet.config.root import Config
from quartet.errors import ConfigError

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | Config"
"""The path of a YAML file, nested mappings with the same keys, or a config."""
Overrides: TypeAlias = "Mapping[str, Any] | Sequence[str]"
"""Settings by key, such as ``{"run.steps": 10}``, or as on the command line: ``["run.steps=10"]``."""


def load_config(source: ConfigSource, overrides: Overrides = ()) -> Config:
    """Return a config with all its defaults. ``quartet config reference`` lists the settings.

    Relative paths start at the working directory. Raises ConfigError that names every invalid key.
    """
    if isinstance(overrides, Mapping):
        plain = copy_sections(overrides)
        assignments = [f"{key}={json.dumps(value)}" for key, value in plain.items()]
    else:
        assignments = [overrides] if isinstance(overrides, str) else list(overrides)
    if isinstance(source, Config):
        return config_of(source.model_dump(mode="json"), assignments) if assignments else source
    if isinstance(source, Mapping):
        return config_of(source, assignments)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"config of type {type(source).__name__}; expected the path of a YAML file, a mapping or a config"
        )
    return load_file(Path(source), assignments)
