"""The settings that can be changed during a run: the one table of their names, keys and bounds.

A change replaces a key of the config from a step on. Everything that reads the config of a step uses it, and a step that is
repeated has the same config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quartet.config.root import Config
from quartet.config.section import NAME_PATTERN

MAX_GROWTH = 10.0
"""Largest value of a setting, as a multiple of its configured value. The KL coefficient may always be raised to 1, and a
weight to 10."""
MIN_ADAPTIVE_KL_COEFFICIENT = 1e-6
"""Smallest KL coefficient with an adaptive controller. The controller multiplies, so it could never leave 0."""


def _up_to(configured: float) -> float:
    """Return the upper bound, rounded as it is displayed, so that the displayed bound is accepted."""
    return float(f"{MAX_GROWTH * configured:.6g}")


def _kl_bounds(config: Config, configured: float) -> tuple[float, float]:
    is_fixed = config.algorithm.kl_controller.kind == "fixed"
    return 0.0 if is_fixed else MIN_ADAPTIVE_KL_COEFFICIENT, max(1.0, _up_to(configured))


def _weight_bounds(config: Config, configured: float) -> tuple[float, float]:
    limit = _up_to(max(1.0, *map(abs, config.reward.part_weights.values())))
    return -limit, limit


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """A setting that can be changed during a run."""

    name: str
    """Name in commands and in ``changes.jsonl``. NAME stands for a part of an ensemble."""
    key: tuple[str, ...]
    """Path of its key in the config."""
    is_offered: Callable[[Config], bool] = lambda config: True
    """Whether a run with this config can change it."""
    bounds: Callable[[Config, float], tuple[float, float]] = lambda config, configured: (0.0, _up_to(configured))
    """Lowest and highest value, from the config and the configured value."""

    def value(self, config: Config) -> float:
        """Return its value in a config."""
        section: Any = config
        for part in self.key:
            section = _part(section, part) if isinstance(section, tuple) else getattr(section, part)
        return float(section)


LIVE_SETTINGS = (
    LiveSetting(
        "kl_coefficient",
        ("algorithm", "kl_coefficient"),
        lambda config: config.algorithm.distillation is None,
        _kl_bounds,
    ),
    LiveSetting(
        "entropy_coefficient",
        ("algorithm", "entropy_coefficient"),
        # The actor has planned its memory for an entropy in the loss only if it is configured.
        lambda config: config.algorithm.entropy_controller.kind == "fixed" and config.algorithm.trains_entropy,
    ),
    LiveSetting("actor.learning_rate", ("actor", "learning_rate")),
    LiveSetting("critic.learning_rate", ("critic", "learning_rate"), lambda config: config.has_critic),
    LiveSetting("reward.parts.NAME.weight", ("reward", "parts", "NAME", "weight"), bounds=_weight_bounds),
)
"""In the order in which they are listed. A learning rate is the initial value of its schedule."""
LIVE_NAME_PATTERN = "|".join(
    f"^{setting.name.replace('.', chr(92) + '.').replace('NAME', NAME_PATTERN.strip('^$'))}$"
    for setting in LIVE_SETTINGS
)
"""Regular expression of all names."""


def live_settings(config: Config) -> dict[str, LiveSetting]:
    """Return the rows of the table for a run by name, those of an ensemble once for each part."""
    rows = []
    for row in LIVE_SETTINGS:
        parts = config.reward.part_weights if "NAME" in row.key else ["NAME"]
        for part in parts:
            key = tuple(part if each == "NAME" else each for each in row.key)
            rows.append(replace(row, name=row.name.replace("NAME", part), key=key))
    return {row.name: row for row in rows}


def with_values(config: Config, values: Mapping[str, float]) -> Config:
    """Return the config with the values of live settings by name. Other names are ignored."""
    for name, row in live_settings(config).items():
        if name in values and values[name] != row.value(config):
            config = _replaced(config, row.key, values[name])
    return config


def _replaced(section: Any, key: tuple[str, ...], value: float) -> Any:
    if not key:
        return value
    name, *rest = key
    if isinstance(section, tuple):
        return tuple(_replaced(part, tuple(rest), value) if part.name == name else part for part in section)
    return section.model_copy(update={name: _replaced(getattr(section, name), tuple(rest), value)})


def _part(parts: tuple[Any, ...], name: str) -> Any:
    return next(part for part in parts if part.name == name)
