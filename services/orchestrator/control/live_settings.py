"""Live settings of a run: the log of their changes, which gives the config of each step.

Each change names the first step that it applies to, and is on disk before it is confirmed. So a step that is recomputed uses the
same settings, and a run is a function of its config, its seed and its changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from quartet.config.live_settings import LiveSetting, live_settings, with_values
from quartet.config.root import Config
from quartet.contract.control import Setting, SettingChange
from quartet.errors import ConfigError, FailedPrecondition, InvalidRequest
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.control.run_control import RunControl

MAX_USER_LENGTH = 200
"""Longest name of the user who made a change. It is kept for as long as the run."""


def read_changes(files: RunFiles) -> list[SettingChange]:
    """Return the changes of a run. Raises ConfigError with the number of a malformed line."""
    changes = []
    for number, line in enumerate(files.read_changes(), 1):
        try:
            changes.append(SettingChange(**line))
        except TypeError:
            raise ConfigError(
                f"changes {files.changes}:{number}: is not a change of a setting; fix the file, or return to an earlier "
                "checkpoint with quartet rollback"
            ) from None
    return changes


def config_at(config: Config, changes: Sequence[SettingChange], step: int) -> Config:
    """Return the config of ``step``: the configured one with all changes up to it."""
    return with_values(config, {change.setting: change.after for change in changes if change.step <= step})


class LiveSettings:
    """The live settings of one run. Any thread may change them; the training thread starts steps."""

    def __init__(self, config: Config, files: RunFiles, control: RunControl) -> None:
        """Refuse all changes before ``resume``, and while ``control`` has a pending rollback."""
        self._config, self._files, self._control = config, files, control
        self._offered = {name: row for name, row in live_settings(config).items() if row.is_offered(config)}
        self._lock = threading.Lock()
        self._changes: list[SettingChange] = []
        self._started_step: int | None = None
        self._state = AlgorithmState(config)

    def resume(self, committed: int, state: AlgorithmState) -> None:
        """Read the run's earlier changes and accept new ones, which are applied to ``state``.

        ``committed`` is the last committed step.
        """
        with self._lock:
            self._changes = read_changes(self._files)
            # The step after the last committed one may have started already.
            self._started_step, self._state = committed + 1, state

    def close(self) -> None:
        """Refuse changes until ``resume``, because the run rolls back. Waits for a change in progress."""
        with self._lock:
            self._started_step = None

    def start_step(self, step: int) -> None:
        """Start ``step``: apply its changes to the algorithm's state. Later changes apply to later steps."""
        with self._lock:
            self._started_step = max(step, self._started_step or 0)
            self._state.set_coefficients(
                {change.setting: change.after for change in self._changes if change.step == step}
            )

    def config_at(self, step: int) -> Config:
        """Return the config of ``step``, without what controllers of the algorithm move."""
        with self._lock:
            return config_at(self._config, self._changes, step)

    def settings(self) -> list[Setting]:
        """Return the settings that can be changed now; none before the run has started."""
        with self._lock:
            return [] if self._started_step is None else [self._setting(row) for row in self._offered.values()]

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
                raise InvalidRequest(f"settings: none given; expected some of {', '.join(self._offered)}")
            if first > self._config.run.steps:
                raise FailedPrecondition("settings: the last step has started, so a change would have no effect")
            before = {name: self._checked(name, after).value for name, after in values.items()}
            # In the order of the settings: a map of the contract has none.
            made = [
                SettingChange(name, before[name], values[name], first, user, at)
                for name in self._offered
                if name in before
            ]
            self._check_weights(values, first)
            self._files.append_changes([asdict(change) for change in made])
            self._changes += made
            return made

    def _check_weights(self, values: Mapping[str, float], step: int) -> None:
        """Raise InvalidRequest if ``values`` would leave no source to train on from ``step`` on."""
        config = config_at(self._config, self._changes, step)
        weights, after = config.reward.part_weights, with_values(config, values).reward.part_weights
        if after != weights and not any(after.values()):
            first = next(name for name, row in self._offered.items() if name in values and row.key[0] == "reward")
            raise InvalidRequest(
                f"{first} 0: all weights would be 0 from step {step} on, so nothing would be trained on; "
                "give another part a weight in the same command"
            )

    def _checked(self, name: str, value: float) -> Setting:
        if name not in self._offered:
            raise InvalidRequest(f"{name}: not a live setting; expected one of {', '.join(self._offered)}")
        setting = self._setting(self._offered[name])
        if not (math.isfinite(value) and setting.low <= value <= setting.high):
            raise InvalidRequest(f"{name} {value:g}: expected {setting.low:g} to {setting.high:g}")
        return setting

    def _setting(self, row: LiveSetting) -> Setting:
        started = self._started_step or 0
        value = row.value(config_at(self._config, self._changes, started + 1))
        if not any(change.setting == row.name and change.step > started for change in self._changes):
            value = self._state.coefficients.get(row.name, value)
        return Setting(row.name, value, *row.bounds(self._config, row.value(self._config)))
