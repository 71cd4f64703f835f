"""`quartet view RUNS`: the gateway alone, over runs on the disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.gateway_process import Gateway
from quartet.launcher.service_process import how_it_ended, last_lines
from quartet.run_directory.run_files import RunFiles

console = Console()
PATIENCE = 60.0
"""Seconds that it may take to get ready."""
DRAIN = 5.0
"""Seconds that it has to end."""


def view(directory: Path, host: str, port: int, allowed_hosts: Sequence[str], allow_plaintext: bool) -> None:
    """Shows a folder of runs, or one run, until interrupted. Raises ConfigError."""
    runs, run = _what(directory)
    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        log = Path(folder) / "gateway.log"
        log.touch()
        arguments = ["--runs", str(runs), "--listen", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        for name in allowed_hosts:
            arguments += ["--allow-host", name]
        if allow_plaintext:
            arguments.append("--allow-plaintext")
        gateway = Gateway(arguments, log, {})
        try:
            gateway.wait_until_ready(PATIENCE)
            console.print(f"dashboard: {gateway.link(run)}", highlight=False, soft_wrap=True, markup=False)
            while gateway.process.poll() is None:
                time.sleep(0.2)
            raise ServiceFailed(f"gateway: {how_it_ended(gateway.process)}; {last_lines(log)}")
        finally:
            gateway.terminate()
            gateway.reap(time.monotonic() + DRAIN)


def _what(directory: Path) -> tuple[Path, str | None]:
    """The folder of runs, and the run in it that was meant, if it was one."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: is no directory; give a folder of runs, such as runs, or one run, such as runs/NAME"
        )
    if RunFiles(directory).is_a_run():
        place = directory.resolve()
        return place.parent, place.name
    if not any(RunFiles(path).is_a_run() for path in directory.iterdir()):
        raise ConfigError(
            f"{directory}: holds no run; give a folder of runs, such as runs, or one run, such as runs/NAME"
        )
    return directory, None
