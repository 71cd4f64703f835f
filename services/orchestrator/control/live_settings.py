"""Settings that can be changed during a run: coefficients of KL and entropy, learning rates, and weights of reward sources.

Each change names the first step that it applies to, and is on disk before it is confirmed. So a step that is recomputed uses the
same settings, and a run is a function of its config, its seed and its changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from quartet.config.models import TrainedModelConfig
from quartet.config.root import Config
from quartet.contract.control import Setting, SettingChange
from quartet.contract.status import Role
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.run_control import RunControl

KL_COEFFICIENT = "kl_coefficient"
ENTROPY_COEFFICIENT = "entropy_coefficient"
MAX_GROWTH = 10.0
"""Largest value of a setting, as a multiple of its configured value. The KL coefficient may always be raised to 1, and a
weight to 10."""
MIN_ADAPTIVE_KL_COEFFICIENT = 1e-6
"""Smallest KL coefficient with an adaptive controller. The controller multiplies, so it could never leave 0."""
MAX_USER_LENGTH = 200
"""Longest name of the user who made a change. It is kept for as long as the run."""


def learning_rate_setting(role: Role) -> str:
    """Return the name of the setting for a model's configured learning rate, from which its schedule starts."""
    return f"{role}.learning_rate"


def part_weight_setting(name: str) -> str:
    """Return the name of the setting for the weight of an ensemble's part."""
    return f"reward.parts.{name}.weight"


class LiveSettings:
    """The live settings of one run. Any thread may change them; the training thread starts steps."""

    def __init__(self, config: Config, files: RunFiles, control: RunControl) -> None:
        """Refuse all changes before ``resume``, and while ``control`` has a pending rollback."""
        self._config, self._files, self._control = config, files, control
        self._lock = threading.Lock()
        self._changes: list[SettingChange] = []
        self._started_step: int | None = None
        self._kl_coefficient: Callable[[], float] = lambda: config.algorithm.kl_coefficient

    def resume(self, committed: int, kl_coefficient: Callable[[], float]) -> None:
        """Read the run's earlier changes and accept new ones.

        ``committed`` is the last committed step. ``kl_coefficient`` returns the current coefficient.
        """
        with self._lock:
            self._changes = [self._parse(line, number) for number, line in enumerate(self._files.read_changes(), 1)]
            # The step after the last committed one may have started already.
            self._started_step, self._kl_coefficient = committed + 1, kl_coefficient

    def close(self) -> None:
        """Refuse changes until ``resume``, because the run rolls back. Waits for a change in progress."""
        with self._lock:
            self._started_step = None

    def start_step(self, step: int) -> float | None:
        """Start ``step``: later changes apply to later steps. Returns the KL coefficient that was set for this step, if any."""
        with self._lock:
            self._started_step = max(step, self._started_step or 0)
            values = [
                change.after for change in self._changes if change.step == step and change.setting == KL_COEFFICIENT
            ]
            return values[-1] if values else None

    def learning_rate_factor(self, role: Role, step: int) -> float:
        """Return the factor by which changes multiply the scheduled learning rate of ``step``."""
        with self._lock:
            return self._learning_rate(role, step) / self._trained(role).learning_rate

    def entropy_coefficient(self, step: int) -> float:
        """Return the entropy coefficient of ``step`` without an adaptive controller."""
        with self._lock:
            return self._value(ENTROPY_COEFFICIENT, step, self._config.algorithm.entropy_coefficient)

    def part_weights(self, step: int) -> dict[str, float]:
        """Return the weight of each part of an ensemble in ``step``, by name; empty for a single source."""
        with self._lock:
            return self._part_weights(step)

    def settings(self) -> list[Setting]:
        """Return the settings that can be changed now; none before the run has started."""
        with self._lock:
            return [] if self._started_step is None else [self._setting(name) for name in self._names()]

    def change(self, values: Mapping[str, float], user: str) -> list[SettingChange]:
        """Change settings from the next step on: all of ``values``, or none if one is refused.

        Raises InvalidRequest for a wrong name, value or user, FailedPrecondition if the run has not started, rolls back or has no
        further step, and StorageFailed if the changes cannot be written.
        """
        if step := self._control.rollback_step:
            raise FailedPrecondition(f"settings: the run rolls back to step {step}; change them when it is done")
        with self._lock:
            if self._started_step is None:
                raise FailedPrecondition(
                    "settings: the run has not started yet, or rolls back; wait until its state is training"
                )
            if len(user) > MAX_USER_LENGTH or not user.isprintable():
                raise InvalidRequest(
                    f"user: expected one line of at most {MAX_USER_LENGTH} characters, got {len(user)} characters"
                )
            first, at = self._started_step + 1, time.time()
            if not values:
                raise InvalidRequest(f"settings: none given; expected some of {', '.join(self._names())}")
            if first > self._config.run.steps:
                raise FailedPrecondition("settings: the last step has started, so a change would have no effect")
            before = {name: self._checked(name, after).value for name, after in values.items()}
            # In the order of the settings: a map of the contract has none.
            made = [
                SettingChange(name, before[name], values[name], first, user, at)
                for name in self._names()
                if name in before
            ]
            self._check_weights(values, first)
            self._files.append_changes([asdict(change) for change in made])
            self._changes += made
            return made

    def _parse(self, line: dict[str, Any], number: int) -> SettingChange:
        try:
            return SettingChange(**line)
        except TypeError:
            raise ConfigError(
                f"changes {self._files.changes}:{number}: is not a change of a setting; fix the file, or return to an earlier "
                "checkpoint with quartet rollback"
            ) from None

    def _names(self) -> list[str]:
        roles = [Role.ACTOR, *([Role.CRITIC] if self._config.has_critic else [])]
        penalties = [KL_COEFFICIENT] if self._config.algorithm.distillation is None else []
        # The actor has planned its memory for an entropy in the loss only if it is configured.
        is_fixed = self._config.algorithm.entropy_controller.kind == "fixed"
        if is_fixed and self._config.algorithm.trains_entropy:
            penalties.append(ENTROPY_COEFFICIENT)
        weights = [part_weight_setting(name) for name in self._config.reward.part_weights]
        return [*penalties, *(learning_rate_setting(role) for role in roles), *weights]

    def _check_weights(self, values: Mapping[str, float], step: int) -> None:
        """Raise InvalidRequest if ``values`` would leave no source to train on from ``step`` on."""
        weights = self._part_weights(step)
        after = {name: values.get(part_weight_setting(name), weight) for name, weight in weights.items()}
        if after != weights and not any(after.values()):
            first = next(name for name in map(part_weight_setting, weights) if name in values)
            raise InvalidRequest(
                f"{first} 0: all weights would be 0 from step {step} on, so nothing would be trained on; "
                "give another part a weight in the same command"
            )

    def _checked(self, name: str, value: float) -> Setting:
        if name not in self._names():
            raise InvalidRequest(f"{name}: not a live setting; expected one of {', '.join(self._names())}")
        setting = self._setting(name)
        if not (math.isfinite(value) and setting.low <= value <= setting.high):
            raise InvalidRequest(f"{name} {value:g}: expected {setting.low:g} to {setting.high:g}")
        return setting

    def _setting(self, name: str) -> Setting:
        if name == KL_COEFFICIENT:
            algorithm, started = self._config.algorithm, self._started_step or 0
            pending = [change.after for change in self._changes if change.setting == name and change.step > started]
            low = 0.0 if algorithm.kl_controller.kind == "fixed" else MIN_ADAPTIVE_KL_COEFFICIENT
            value = pending[-1] if pending else self._kl_coefficient()
            return Setting(name, value, low, max(1.0, _max_value(algorithm.kl_coefficient)))
        if name == ENTROPY_COEFFICIENT:
            configured = self._config.algorithm.entropy_coefficient
            value = self._value(name, (self._started_step or 0) + 1, configured)
            return Setting(name, value, 0.0, _max_value(configured))
        if (part := self._part_of(name)) is not None:
            limit = _max_value(max(1.0, *map(abs, self._config.reward.part_weights.values())))
            value = self._part_weights((self._started_step or 0) + 1)[part]
            return Setting(name, value, -limit, limit)
        role = Role(name.partition(".")[0])
        value = self._learning_rate(role, (self._started_step or 0) + 1)
        return Setting(name, value, 0.0, _max_value(self._trained(role).learning_rate))

    def _learning_rate(self, role: Role, step: int) -> float:
        return self._value(learning_rate_setting(role), step, self._trained(role).learning_rate)

    def _part_weights(self, step: int) -> dict[str, float]:
        return {
            name: self._value(part_weight_setting(name), step, weight)
            for name, weight in self._config.reward.part_weights.items()
        }

    def _part_of(self, setting: str) -> str | None:
        """Return the part of an ensemble whose weight a setting is, or None."""
        names = self._config.reward.part_weights
        return next((name for name in names if part_weight_setting(name) == setting), None)

    def _value(self, setting: str, step: int, configured: float) -> float:
        """Return the value of a setting in ``step``: that of the last change up to it, or the configured one."""
        values = [change.after for change in self._changes if change.setting == setting and change.step <= step]
        return values[-1] if values else configured

    def _trained(self, role: Role) -> TrainedModelConfig:
        return self._config.actor if role is Role.ACTOR else self._config.critic


def _max_value(configured: float) -> float:
    """Return the upper bound, rounded as it is displayed, so that the displayed bound is accepted."""
    return float(f"{MAX_GROWTH * configured:.6g}")
