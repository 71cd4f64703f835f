"""`quartet pause|resume|stop|checkpoint|set RUN`: what a user asks of a run that is going on, through its gateway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from quartet.cli.remote.gateway_client import Target, asking
from quartet.errors import ConfigError

console = Console()


def pause(target: Target) -> None:
    """The run waits after the step in hand."""
    _ask(target, "/pause")
    _say(f"{target.given}: pauses after the step in hand; quartet resume {target.given} goes on")


def resume(target: Target) -> None:
    """The run goes on."""
    _ask(target, "/resume")
    _say(f"{target.given}: goes on")


def stop(target: Target) -> None:
    """The run ends after the step in hand, its policy saved."""
    _ask(target, "/stop")
    _say(f"{target.given}: stops after the step in hand and saves its policy")


def checkpoint(target: Target) -> None:
    """The run writes a checkpoint after the step in hand."""
    _ask(target, "/checkpoint")
    _say(f"{target.given}: writes a checkpoint after the step in hand")


def change(target: Target, assignments: Sequence[str]) -> None:
    """Changes settings of a run that goes on; without any, says which can be changed and how far."""
    values = dict(map(_assignment, assignments))
    if len(values) < len(assignments):
        raise ConfigError(f"{' '.join(assignments)}: names a setting twice; give each once")
    with asking(target) as api:
        if not values:
            _show(api.get("/settings")["settings"], target)
            return
        before = len(api.get("/settings")["changes"])
        api.patch("/settings", values)
        changes = api.get("/settings")["changes"][before:]
    for item in changes:
        _say(f"{target.given}: {item['setting']} {item['before']:g} -> {item['after']:g} from step {item['step']} on")


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
        if not name or not math.isfinite(number):
            raise ValueError
        return name, number
    except ValueError:
        raise ConfigError(f"{text}: expected NAME=NUMBER, such as kl_coefficient=0.1") from None


def _show(settings: Sequence[dict[str, Any]], target: Target) -> None:
    if not settings:
        raise ConfigError(
            f"{target.given}: no run is going on there; settings of one that has ended are in its config.yaml"
        )
    for item in settings:
        _say(f"{item['name']} = {item['value']:g} (from {item['low']:g} to {item['high']:g})")


def _ask(target: Target, command: str) -> None:
    with asking(target) as api:
        api.post(command)


def _say(line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)
