"""The arguments of commands for active runs: `quartet watch`, `pause` and others. Their modules are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunOrURL = Annotated[
    str,
    typer.Argument(metavar="RUN|URL", help="An active run: its directory runs/NAME, or http://HOST:PORT/runs/NAME."),
]
RunName = Annotated[
    str | None, typer.Option("--run", metavar="NAME", help="Name of the run, if the URL does not contain it.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the gateway token. Default: the variable QUARTET_GATEWAY_TOKEN. Only with a URL.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when it is done.")]


def watch(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Show the progress of an active run."""
    from quartet.cli.remote.watch import watch as show
    from quartet.gateway.client import find_run

    show(find_run(run, name, token_file))


def pause(run: RunOrURL, name: RunName = None, token_file: TokenFile = None, wait: Wait = False) -> None:
    """Pause a run after the current step."""
    _send("pause", run, name, token_file, wait)


def resume(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Resume a paused run."""
    _send("resume", run, name, token_file)


def stop(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Stop a run after the current step, and save its policy."""
    _send("stop", run, name, token_file)


def checkpoint(run: RunOrURL, name: RunName = None, token_file: TokenFile = None, wait: Wait = False) -> None:
    """Write a checkpoint of an active run after the current step."""
    _send("checkpoint", run, name, token_file, wait)


def _send(command: str, run: str, name: str | None, token_file: Path | None, wait: bool = False) -> None:
    from quartet.cli.remote.control import send
    from quartet.gateway.client import find_run

    send(find_run(run, name, token_file), command, wait)


def profile(
    run: RunOrURL,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Number of steps, from the next one on.")] = 2,
    name: RunName = None,
    token_file: TokenFile = None,
) -> None:
    """Profile the next steps of an active run, and print where the time of actor, critic and generators went.

    Waits until the steps are taken. The traces are saved with the run.
    """
    from quartet.cli.remote.profile import profile as request
    from quartet.gateway.client import find_run

    request(find_run(run, name, token_file), steps)


def change_settings(
    run: RunOrURL,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SETTING=NUMBER...]",
            help="New value, such as kl_coefficient=0.1. Without arguments: list the settings.",
        ),
    ] = None,
    name: RunName = None,
    token_file: TokenFile = None,
) -> None:
    """Change settings of an active run."""
    from quartet.cli.remote.control import change_settings as send
    from quartet.gateway.client import find_run

    send(find_run(run, name, token_file), settings or [])
