"""Named places at which a test may hold, kill or fail a process. Off unless the environment asks: then each costs one comparison.

``QUARTET_FAILPOINTS`` is a list ``NAME=ACTION[@HIT],...``: at the HIT-th passing (the first, unless given) of the place NAME

- ``hold`` creates ``NAME.reached``, which holds the process id, and waits until there is ``NAME.go``;
- ``kill`` ends the process with SIGKILL;
- ``fail`` raises InjectedFault;
- ``delay:SECONDS`` waits so long.

The files lie in ``QUARTET_FAILPOINTS_FOLDER``. Each failpoint fires once for a folder, by the file ``NAME.fired``: a process
that was killed at one, and started again with the same environment, passes it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from quartet.errors import ConfigError

log = structlog.get_logger()

VARIABLE = "QUARTET_FAILPOINTS"
FOLDER_VARIABLE = "QUARTET_FAILPOINTS_FOLDER"
POLL = 0.01
"""Seconds between looks for the file that ends a ``hold``."""

FAILPOINTS = {
    "actor.generating": "the first trajectory of a Generate is finished, nothing of it is in the stream",
    "actor.appending": "finished trajectories are about to go to the stream",
    "actor.appended": "finished trajectories are in the stream",
    "reward.scoring": "a batch is about to be scored",
    "reference.scoring": "a batch is about to get its reference log-probs",
    "critic.scoring": "a batch is about to get its values",
    "orchestrator.sealing": "a step is scored and prepared, its experience not in Redis",
    "orchestrator.sealed": "the experience is in Redis, no Update is sent",
    "actor.stepping": "gradients of a mini-batch of the policy are there, the optimizer step is not taken",
    "actor.stepped": "an optimizer step of the policy is taken",
    "critic.stepping": "gradients of a mini-batch of the value model are there, the optimizer step is not taken",
    "critic.stepped": "an optimizer step of the value model is taken",
    "orchestrator.updated": "actor and critic have taken the step's updates, nothing is committed",
    "orchestrator.committed": "the step's metrics are on the disk, its trajectories are not acknowledged",
    "orchestrator.acknowledged": "the step's trajectories are acknowledged",
    "actor.saving": "some of the policy's files of a checkpoint are written, some are not",
    "critic.saving": "some of the value model's files of a checkpoint are written, some are not",
    "orchestrator.manifest_writing": "both models are saved, the manifest is not written",
    "orchestrator.manifest_written": "the manifest is on the disk, the checkpoint does not have its name",
    "orchestrator.checkpointed": "the checkpoint has its name, what it covers is still in Redis",
}
"""Every failpoint: where a process is when it passes it."""

_SETTING = re.compile(
    r"(?P<name>[\w.]+)=(?P<action>hold|kill|fail|delay:(?P<seconds>\d+(\.\d+)?))(@(?P<hit>[1-9]\d*))?", re.ASCII
)


class InjectedFault(RuntimeError):
    """What a failpoint with the action ``fail`` raises: an error that no code expects."""


@dataclass(frozen=True, slots=True)
class _Action:
    kind: str
    seconds: float
    hit: int


class _Armed:
    """The failpoints that are set, and how often each has been passed."""

    def __init__(self, actions: Mapping[str, _Action], folder: Path) -> None:
        self._actions, self._folder = actions, folder
        self._passed = dict.fromkeys(actions, 0)
        self._lock = threading.Lock()

    def reach(self, name: str) -> None:
        action = self._actions.get(name)
        if action is None:
            return
        with self._lock:
            self._passed[name] += 1
            due = self._passed[name] == action.hit
        if due and self._is_first(name):
            log.warning("failpoint", name=name, action=action.kind, hit=action.hit)
            self._act(name, action)

    def _is_first(self, name: str) -> bool:
        try:
            (self._folder / f"{name}.fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, name: str, action: _Action) -> None:
        match action.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                raise InjectedFault(f"failpoint {name}")
            case "delay":
                time.sleep(action.seconds)
            case "hold":
                reached, partial = self._folder / f"{name}.reached", self._folder / f".{name}.partial"
                partial.write_text(f"{os.getpid()}\n")
                partial.rename(reached)
                while not (self._folder / f"{name}.go").exists():
                    time.sleep(POLL)


_armed: _Armed | None = None


def failpoint(name: str) -> None:
    """Marks a place, one of ``FAILPOINTS``. Does nothing in a process that has set none."""
    if _armed is not None:
        _armed.reach(name)


def arm(environment: Mapping[str, str]) -> list[str]:
    """Sets the failpoints that ``environment`` asks for, and gives their names. For the start of a process.

    Raises ConfigError for an unknown name, a malformed setting, or a folder that is not there.
    """
    global _armed
    text = environment.get(VARIABLE, "")
    actions: dict[str, _Action] = {}
    for setting in filter(None, map(str.strip, text.split(","))):
        name, action = _parse(setting)
        if name in actions:
            raise ConfigError(f"{VARIABLE}: {name}: given twice; a failpoint fires once")
        actions[name] = action
    _armed = _Armed(actions, _folder(environment)) if actions else None
    return list(actions)


def _parse(setting: str) -> tuple[str, _Action]:
    found = _SETTING.fullmatch(setting)
    if found is None:
        raise ConfigError(
            f"{VARIABLE}: {setting!r}: expected NAME=ACTION or NAME=ACTION@HIT with the action hold, kill, fail or "
            "delay:SECONDS, and HIT from 1 on"
        )
    if found["name"] not in FAILPOINTS:
        raise ConfigError(f"{VARIABLE}: {found['name']}: unknown failpoint; there are: {', '.join(FAILPOINTS)}")
    kind = found["action"].partition(":")[0]
    return found["name"], _Action(kind, float(found["seconds"] or 0), int(found["hit"] or 1))


def _folder(environment: Mapping[str, str]) -> Path:
    folder = Path(environment.get(FOLDER_VARIABLE, ""))
    if not environment.get(FOLDER_VARIABLE) or not folder.is_dir():
        raise ConfigError(
            f"{FOLDER_VARIABLE}: {str(folder)!r}: expected a folder, in which failpoints note that they fired"
        )
    return folder
