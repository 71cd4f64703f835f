"""Settings that are changed while a run goes on: each change is for a first step, and written down before it is confirmed.

So a step that is taken again learns with what it had, and a run is a function of its config, its seed and its changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quartet.config import Config, TrainedModelConfig
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest
from quartet.run_directory.run_files import RunFiles
from quartet.types import Role

KL_COEFFICIENT = "kl_coefficient"
HIGHEST = 10.0
"""A setting may grow to so many times its configured value, a KL coefficient to 1 at least."""
MIN_STEERED = 1e-6
"""A KL controller that multiplies never leaves 0, so with one the coefficient stays at this or above."""
MAX_USER_LENGTH = 200
"""Characters of a name that is kept with every change, for as long as the run lasts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that can be changed: what it is for the next step, and the least and the most that it may be."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Change:
    """``step`` is the first that the change is for; ``at`` is in seconds since 1970."""

    setting: str
    before: float
    after: float
    step: int
    user: str
    at: float


def learning_rate_of(role: Role) -> str:
    """The setting's name: of the learning rate that the model's schedule starts from."""
    return f"{role}.learning_rate"


class Changes:
    """The changes of one run. Thread-safe: any number of callers change, the training thread begins steps."""

    def __init__(self, config: Config, files: RunFiles) -> None:
        self._config, self._files = config, files
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._begun: int | None = None
        self._kl_coefficient = 0.0

    def resume(self, committed: int, kl_coefficient: float) -> None:
        """Goes on after ``committed`` steps, with the coefficient of the next one. What was changed before stays so."""
        with self._lock:
            self._changes = [self._read(line, number) for number, line in enumerate(self._files.read_changes(), 1)]
            # The step after the last committed one may have begun before.
            self._begun, self._kl_coefficient = committed + 1, kl_coefficient

    def close(self) -> None:
        """Takes no change until ``resume``: the run goes another way, and no caller is in the middle of one."""
        with self._lock:
            self._begun = None

    def begin(self, step: int, kl_coefficient: float) -> float:
        """The KL coefficient of ``step``, which begins with what the controller says. Later changes are for later steps."""
        with self._lock:
            self._begun = max(step, self._begun or 0)
            for change in self._changes:
                if change.step == step and change.setting == KL_COEFFICIENT:
                    kl_coefficient = change.after
            self._kl_coefficient = kl_coefficient
            return kl_coefficient

    def learning_rate_factor(self, role: Role, step: int) -> float:
        """What the schedule's learning rate of ``step`` is multiplied by."""
        with self._lock:
            return self._learning_rate(role, step) / self._trained(role).learning_rate

    def settings(self) -> list[Setting]:
        """What can be changed now; nothing before the run has begun."""
        with self._lock:
            return [] if self._begun is None else [self._setting(name) for name in self._names()]

    def change(self, values: Mapping[str, float], user: str) -> list[Change]:
        """Changes settings from the first step on that has not begun: all of them or, where one is refused, none.

        Raises InvalidRequest, FailedPrecondition before the run has begun, StorageFailed when it cannot be written down.
        """
        with self._lock:
            if self._begun is None:
                raise FailedPrecondition(
                    "settings: the run has not begun yet, or is going back; wait until its state is training"
                )
            if len(user) > MAX_USER_LENGTH or not user.isprintable():
                raise InvalidRequest(f"user: expected one line of at most {MAX_USER_LENGTH} characters, got {len(user)}")
            first, at = self._begun + 1, time.time()
            if not values:
                raise InvalidRequest(f"settings: none given; expected some of {', '.join(self._names())}")
            if first > self._config.run.steps:
                raise FailedPrecondition("settings: the last step has begun; nothing would change")
            made = [
                Change(name, self._checked(name, after).value, after, first, user, at) for name, after in values.items()
            ]
            self._files.append_changes([asdict(change) for change in made])
            self._changes += made
            return made

    def _read(self, line: dict[str, Any], number: int) -> Change:
        try:
            return Change(**line)
        except TypeError:
            raise ConfigError(
                f"changes {self._files.changes}:{number}: is no change of a setting; mend the file, or go back to a checkpoint "
                "before it with quartet rollback"
            ) from None

    def _names(self) -> list[str]:
        roles = [Role.ACTOR, *([Role.CRITIC] if self._config.has_critic else [])]
        return [KL_COEFFICIENT, *(learning_rate_of(role) for role in roles)]

    def _checked(self, name: str, value: float) -> Setting:
        if name not in self._names():
            raise InvalidRequest(f"{name}: no setting that can be changed; expected one of {', '.join(self._names())}")
        setting = self._setting(name)
        if not (math.isfinite(value) and setting.low <= value <= setting.high):
            raise InvalidRequest(f"{name} {value:g}: expected {setting.low:g} to {setting.high:g}")
        return setting

    def _setting(self, name: str) -> Setting:
        if name == KL_COEFFICIENT:
            algorithm = self._config.algorithm
            pending = [
                change.after for change in self._changes if change.setting == name and change.step > (self._begun or 0)
            ]
            low = 0.0 if algorithm.kl_controller.kind == "fixed" else MIN_STEERED
            value = pending[-1] if pending else self._kl_coefficient
            return Setting(name, value, low, max(1.0, _highest(algorithm.kl_coefficient)))
        role = Role(name.partition(".")[0])
        value = self._learning_rate(role, (self._begun or 0) + 1)
        return Setting(name, value, 0.0, _highest(self._trained(role).learning_rate))

    def _learning_rate(self, role: Role, step: int) -> float:
        name = learning_rate_of(role)
        made = [change.after for change in self._changes if change.setting == name and change.step <= step]
        return made[-1] if made else self._trained(role).learning_rate

    def _trained(self, role: Role) -> TrainedModelConfig:
        return self._config.actor if role is Role.ACTOR else self._config.critic


def _highest(configured: float) -> float:
    """Rounded as it is shown: what is shown may be asked for."""
    return float(f"{HIGHEST * configured:.6g}")
