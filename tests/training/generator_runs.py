"""Training runs with generators, each behind a separate server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quartet.config import Config, load_config
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.credentials import LOCAL
from quartet.rpc.server import Server
from quartet.run_directory.run_files import RunFiles
from quartet.services.generator.factory import build_generator
from tests.training.runs import ActiveRun, fleet, orchestrator, wait_for


@contextmanager
def generators(config: Config, count: int) -> Iterator[list[Server]]:
    built = [build_generator(config, ComputeThread(), 1, LOCAL) for _ in range(count)]
    servers = [Server([each], "127.0.0.1:0") for each in built]
    try:
        yield servers
    finally:
        for server in servers:
            with suppress(RuntimeError):
                server.stop(0.0)


@contextmanager
def generator_run(config: Config, count: int, steps: int) -> Iterator[tuple[ActiveRun, list[Server]]]:
    """Start a run with generators and pause it after ``steps`` steps. The services stay up."""
    with fleet(config) as services, generators(config, count) as servers:
        addresses = f"services.generators={[server.address for server in servers]}"
        files = RunFiles(config.run_directory)
        files.write_config(services.config.to_yaml())
        with orchestrator(load_config(files.config, [addresses])) as running:
            wait_for(running, lambda: running.board.current().step >= steps)
            running.control.pause()
            wait_for(running, lambda: running.board.current().phase == "paused")
            yield running, servers
