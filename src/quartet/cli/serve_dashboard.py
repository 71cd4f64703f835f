"""`quartet view RUNS`: start only the gateway, for recorded runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from quartet.cli.console import make_console
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.gateway_process import GatewayProcess
from quartet.launcher.service_process import describe_exit, log_tail
from quartet.run_directory.run_files import RunFiles

console = make_console()
START_TIMEOUT_SECONDS = 60.0
"""Time limit for the gateway to become ready."""
STOP_TIMEOUT_SECONDS = 5.0
"""Time limit for the gateway to exit."""


def view_runs(directory: Path, host: str, port: int, allowed_hosts: Sequence[str], allow_plaintext: bool) -> None:
    """Serve the dashboard for a folder of runs or for one run, until interrupted. Raises ConfigError."""
    runs, run = _folder_and_run(directory)
    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        log = Path(folder) / "gateway.log"
        log.touch()
        arguments = ["--runs", str(runs), "--listen", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        for name in allowed_hosts:
            arguments += ["--allow-host", name]
        if allow_plaintext:
            arguments.append("--allow-plaintext")
        gateway = GatewayProcess(arguments, log, {})
        try:
            gateway.wait_until_ready(START_TIMEOUT_SECONDS)
            console.print(f"dashboard: {gateway.link(run)}", soft_wrap=True)
            while gateway.process.poll() is None:
                time.sleep(0.2)
            raise ServiceFailed(f"gateway: {describe_exit(gateway.process)}; {log_tail(log)}")
        finally:
            gateway.terminate()
            gateway.wait_or_kill(time.monotonic() + STOP_TIMEOUT_SECONDS)


def _folder_and_run(directory: Path) -> tuple[Path, str | None]:
    """Return the folder of runs, and the name of the run if ``directory`` is a run."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: not a directory; expected a folder of runs, such as runs, or one run, such as runs/NAME"
        )
    if RunFiles(directory).is_run():
        resolved = directory.resolve()
        return resolved.parent, resolved.name
    if not any(RunFiles(path).is_run() for path in directory.iterdir()):
        raise ConfigError(
            f"{directory}: contains no run; expected a folder of runs, such as runs, or one run, such as runs/NAME"
        )
    return directory, None
