"""`quartet train` and `quartet up`: start a run and show its progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shlex import quote

from quartet.buffer.redis_url import environment_overrides
from quartet.cli.console import make_console, plain
from quartet.cli.progress_view import make_view
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.config.url_redaction import redact_url
from quartet.launcher.launcher import Launcher
from quartet.launcher.local_run import follow_run, started_run
from quartet.preflight import nothing_to_resume
from quartet.run_directory.run_files import RunFiles

console = make_console()


def train(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Train, then stop all processes that were started."""
    config = load_config(config_path, [*overrides, *environment_overrides()])
    files = RunFiles(config.run_directory)
    if resume and not overwrite and nothing_to_resume(config, files):
        steps = config.run.steps
        _print_line(
            f"{files.root} is finished: {steps} of {steps} steps; to train further: "
            f"quartet train {quote(str(config_path))} --resume --set run.steps=N, with N over {steps}"
        )
    else:
        run(config, overwrite, resume)
    console.print(f"policy: {files.policy}\nmetrics: {files.metrics}", soft_wrap=True)


def up(config_path: Path, overrides: list[str], overwrite: bool, resume: bool = False) -> None:
    """Train, then keep the services running until interrupted."""
    config = load_config(config_path, [*overrides, *environment_overrides()])
    with _started(config, overwrite, resume) as (launcher, files):
        for role, addresses in launcher.addresses.items():
            console.print(f"{role:<13} {' '.join(addresses)}")
        console.print(f"redis         {redact_url(launcher.url)}", soft_wrap=True)
        _show_progress(launcher, files)
        console.print(
            "the run has ended; the model services keep running until Ctrl-C (a restarted service has its initial weights)",
            soft_wrap=True,
        )
        while True:
            for line in launcher.check():
                _print_line(line)
            time.sleep(0.5)


def run(config: Config, overwrite: bool, resume: bool = False, continue_with: str | None = None) -> None:
    """Execute a run from start to end, and stop its processes. Raises the error that ends it early.

    ``continue_with``: command that continues it, if it is not `quartet train`.
    """
    with _started(config, overwrite, resume, continue_with) as (launcher, files):
        _show_progress(launcher, files)


def _started(
    config: Config, overwrite: bool, resume: bool, continue_with: str | None = None
) -> AbstractContextManager[tuple[Launcher, RunFiles]]:
    return started_run(config, overwrite, resume, _print_line, _activity, continue_with=continue_with)


def _show_progress(launcher: Launcher, files: RunFiles) -> None:
    with make_view(console, files.root) as view:
        follow_run(launcher, files, view)


@contextmanager
def _activity(text: str) -> Iterator[None]:
    if not console.is_terminal:
        console.print(text)
    with console.status(plain(text)):
        yield


def _print_line(line: str) -> None:
    console.print(line, soft_wrap=True)
