"""Named points in the code at which a test can hold, kill or fail a process. Off by default, at the cost of one comparison.

``QUARTET_FAILPOINTS`` is a list ``NAME[:RANK]=ACTION[@HIT],...``. When rank RANK of a worker group (default 0) reaches failpoint
NAME for the HIT-th time (default 1)

- ``hold`` creates ``NAME.reached``, which contains the process id, and waits for the file ``NAME.go``;
- ``kill`` ends the process with SIGKILL;
- ``fail`` raises InjectedFault;
- ``delay:SECONDS`` sleeps.

The files are in ``QUARTET_FAILPOINTS_FOLDER``. Each failpoint fires once per folder, recorded by the file ``NAME.fired``. A
process that was killed at a failpoint passes it after a restart with the same environment.
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
POLL_SECONDS = 0.01
"""Seconds between checks for the file that ends a ``hold`` action."""

FAILPOINTS = {
    "actor.loading": "the process of the actor has begun; nothing is loaded",
    "critic.loading": "the process of the critic has begun; nothing is loaded",
    "reward.loading": "the process of the reward has begun; nothing is loaded",
    "reference.loading": "the process of the reference has begun; nothing is loaded",
    "orchestrator.loading": "the process of the orchestrator has begun; all others are ready",
    "orchestrator.starting": "all processes are ready; the orchestrator has not called a service",
    "actor.generating": "the first trajectory is finished; the stream has no trajectory of this Generate call",
    "actor.appending": "finished trajectories are about to be written to the stream",
    "actor.appended": "finished trajectories are in the stream",
    "engine.trial": "a torch engine is about to try whether it is batch-invariant; the action fail makes the trial fail",
    "generator.loaded": "the engine holds new weights; the caller does not know it yet",
    "environment.resetting": "an episode is about to start",
    "environment.stepping": "a turn is about to be given to its environment",
    "environment.stepped": "the environment has answered a turn; the caller does not know it yet",
    "reward.scoring": "a batch is about to be scored",
    "reference.scoring": "reference log-probs of a batch are about to be computed",
    "critic.scoring": "values of a batch are about to be computed",
    "orchestrator.evaluating": "the greedy responses of an evaluation are scored; the others are not requested",
    "orchestrator.sealing": "a step is scored and prepared; its experience is not in Redis",
    "orchestrator.sealed": "the experience is in Redis; no Update request is sent",
    "actor.stepping": "the gradients of a policy mini-batch are computed; the optimizer step is not taken",
    "actor.stepped": "an optimizer step of the policy is taken",
    "critic.stepping": "the gradients of a value model mini-batch are computed; the optimizer step is not taken",
    "critic.stepped": "an optimizer step of the value model is taken",
    "orchestrator.updated": "actor and critic have applied the updates of the step; the step is not committed",
    "orchestrator.committed": "the metrics of the step are on disk; its trajectories are not acknowledged",
    "orchestrator.acknowledged": "the trajectories of the step are acknowledged",
    "actor.saving": "some files of the policy's checkpoint are written, others are not",
    "critic.saving": "some files of the value model's checkpoint are written, others are not",
    "orchestrator.manifest_writing": "both models are saved; the manifest is not written",
    "orchestrator.manifest_written": "the manifest is on disk; the checkpoint does not have its final name",
    "orchestrator.checkpointed": "the checkpoint has its final name; the experience that it covers is still in Redis",
}
"""Every failpoint, and the state of the process when it reaches it."""

_SETTING = re.compile(
    r"(?P<name>[\w.]+)(:(?P<rank>\d+))?=(?P<action>hold|kill|fail|delay:(?P<seconds>\d+(\.\d+)?))(@(?P<hit>[1-9]\d*))?",
    re.ASCII,
)


class InjectedFault(RuntimeError):
    """The error of a failpoint with the action ``fail``. Only the trial of an engine expects it."""


@dataclass(frozen=True, slots=True)
class _Action:
    kind: str
    seconds: float
    hit: int


class _Armed:
    """The active failpoints, and how often each was reached."""

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
                    time.sleep(POLL_SECONDS)


_armed: _Armed | None = None


def failpoint(name: str) -> None:
    """Mark a point in the code, one of ``FAILPOINTS``. Does nothing in a process without active failpoints."""
    if _armed is not None:
        _armed.reach(name)


def arm(environment: Mapping[str, str], rank: int = 0) -> list[str]:
    """Activate the failpoints of ``environment`` at the start of a process, which is ``rank`` of its group. Return their names.

    Raises ConfigError for an unknown name, a malformed setting, or a missing folder.
    """
    global _armed
    text = environment.get(VARIABLE, "")
    actions: dict[str, _Action] = {}
    names = set[str]()
    for setting in filter(None, map(str.strip, text.split(","))):
        name, action, of_rank = _parse(setting)
        if name in names:
            raise ConfigError(f"{VARIABLE}: {name}: given twice; a failpoint fires once")
        names.add(name)
        if of_rank == rank:
            actions[name] = action
    _armed = _Armed(actions, _folder(environment)) if actions else None
    return list(actions)


def _parse(setting: str) -> tuple[str, _Action, int]:
    match = _SETTING.fullmatch(setting)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {setting!r}: expected NAME=ACTION, NAME:RANK=ACTION or NAME=ACTION@HIT with the action hold, kill, "
            "fail or delay:SECONDS, and HIT from 1 on"
        )
    if match["name"] not in FAILPOINTS:
        raise ConfigError(f"{VARIABLE}: {match['name']}: unknown failpoint; expected one of {', '.join(FAILPOINTS)}")
    kind = match["action"].partition(":")[0]
    return match["name"], _Action(kind, float(match["seconds"] or 0), int(match["hit"] or 1)), int(match["rank"] or 0)


def _folder(environment: Mapping[str, str]) -> Path:
    folder = Path(environment.get(FOLDER_VARIABLE, ""))
    if not environment.get(FOLDER_VARIABLE) or not folder.is_dir():
        raise ConfigError(
            f"{FOLDER_VARIABLE}: {str(folder)!r}: expected an existing folder, where failpoints record that they fired"
        )
    return folder
