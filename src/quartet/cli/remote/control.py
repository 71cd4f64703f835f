"""`quartet pause|resume|stop|checkpoint|set RUN`: commands that an active run receives through its gateway."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from quartet.cli.console import make_console
from quartet.contract.control import RunState
from quartet.errors import ConfigError, ServiceFailed
from quartet.gateway.client import Api, Target, connect

console = make_console()


EFFECTS = {
    "pause": "pauses after the current step; quartet resume {run} continues it",
    "resume": "continues",
    "stop": "stops after the current step and saves its policy",
    "checkpoint": "writes a checkpoint after the current step",
}
"""What the run does, by command."""
POLL_SECONDS = 0.2
"""Time between two questions for the state of a run."""


def send(target: Target, command: str, wait: bool = False) -> None:
    """Send a command, one of EFFECTS. With ``wait``, return when a pause or a checkpoint is complete.

    Raises ServiceFailed if the run ends before.
    """
    with connect(target) as api:
        committed = api.get()["step"] if wait else 0
        api.post(f"/{command}")
        _print(f"{target.given}: {EFFECTS[command].replace('{run}', target.given)}")
        if wait:
            _print(f"{target.given}: {_wait(api, command, committed)}")


def _wait(api: Api, command: str, committed: int) -> str:
    """Wait until the run is paused, or has a checkpoint of ``committed`` steps or more. Return what there is then."""
    while True:
        run = api.get()
        if command == "pause" and run["state"] == RunState.PAUSED:
            return f"paused after step {run['step']}"
        if command == "checkpoint":
            if run["state"] == RunState.PAUSED and not run["step"]:
                raise ServiceFailed(
                    f"{api.target.given}: is paused before its first step, so there is nothing to save; resume it first"
                )
            newest = max((each["step"] for each in api.get("/checkpoints")["items"] if not each["problem"]), default=0)
            if newest >= max(committed, 1):
                return f"has the checkpoint of step {newest}"
        if not run["live"]:
            raise ServiceFailed(f"{api.target.given}: the run ended before the {command}; see its logs")
        time.sleep(POLL_SECONDS)


def change_settings(target: Target, assignments: Sequence[str]) -> None:
    """Change settings of an active run. Without assignments, print the settings and their bounds."""
    values = dict(map(_assignment, assignments))
    if len(values) < len(assignments):
        raise ConfigError(f"{' '.join(assignments)}: a setting is given twice; give each setting once")
    with connect(target) as api:
        if not values:
            _print_settings(api.get("/settings")["settings"], target)
            return
        changes = api.change_settings(values)
    for item in changes:
        _print(f"{target.given}: {item['setting']} {item['before']:g} -> {item['after']:g} from step {item['step']} on")


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
        if not name or not math.isfinite(number):
            raise ValueError
        return name, number
    except ValueError:
        raise ConfigError(
            f"{text}: expected SETTING=NUMBER, such as kl_coefficient=0.1; quartet set RUN lists the settings"
        ) from None


def _print_settings(settings: Sequence[dict[str, Any]], target: Target) -> None:
    if not settings:
        raise ConfigError(
            f"{target.given}: the run is not active, so its settings cannot be changed; see its config.yaml for their values"
        )
    for item in settings:
        _print(f"{item['name']} = {item['value']:g} (from {item['low']:g} to {item['high']:g})")


def _print(line: str) -> None:
    console.print(line, soft_wrap=True)
