"""A run survives the drain of every node in turn: SIGTERM to each process, as from the kubelet, and a new process afterwards."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from quartet.buffer.embedded_redis import find_server
from quartet.system.child_processes import tied_to_parent
from tests.e2e.commands import QUARTET, Command, settings
from tests.e2e.conftest import Run, step_metrics, weights
from tests.e2e.test_separate_processes import (  # noqa: F401 - fixtures
    PASSWORD,
    ROLES,
    deployment,
    start_process,
)
from tests.ports import free_ports

STEPS = settings("run.steps=9", "checkpoint.every_steps=4")
"""A node is drained in the middle of the steps between two checkpoints."""
END_TIMEOUT = 60.0
"""Seconds for a process to end: timeouts.drain_seconds, and a margin for a busy machine."""
RESTART_TIMEOUT = 900.0
"""Seconds for a step after all processes have started again, with a margin for a busy machine."""


class Redis:
    """A Redis with an append-only file, as in the chart. A new process at the same port reads the file."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self._folder = folder / "redis"
        self._folder.mkdir()
        rules = self._folder / "users.acl"
        digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
        rules.write_text(f"user default off\nuser quartet on #{digest} ~* &* +@all\n")
        self._command = [str(find_server()), "--port", str(self.port), "--bind", "127.0.0.1", "--aclfile", str(rules)]
        self._command += ["--dir", str(self._folder), "--appendonly", "yes", "--save", ""]
        self.start()

    def start(self) -> None:
        """Start the server."""
        self.process = subprocess.Popen(tied_to_parent(self._command), cwd=self._folder, stdout=subprocess.DEVNULL)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def redis_port(redis: Redis) -> int:
    return redis.port


@pytest.mark.slow  # Ten processes start again, one after the other.
def test_a_run_survives_the_drain_of_every_node_and_ends_bit_identically(
    start_process: Callable[..., Command],  # noqa: F811
    deployment: Path,  # noqa: F811
    redis: Redis,
    config: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("undisturbed")
    command = Command(QUARTET, "train", config, *STEPS, *settings("gateway.enabled=false"), cwd=folder)
    try:
        undisturbed = Run(command.wait(RESTART_TIMEOUT), folder / "runs/tiny")
    finally:
        command.clean_up()
    assert undisturbed.result.code == 0, undisturbed.result
    tree = yaml.safe_load(deployment.read_text())
    tree |= {"run": {"steps": 9}, "checkpoint": {"every_steps": 4}}
    deployment.write_text(yaml.safe_dump(tree))
    metrics = tmp_path / "runs/tiny/metrics.jsonl"
    pods = {role: start_process("quartet.services", role) for role in ROLES}
    pods["orchestrator"] = start_process("quartet.services", "orchestrator")

    def steps() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def drain(*names: str) -> None:
        """Stop the pods of a node in the middle of a step, and start them again on another one."""
        committed = steps()
        pods["orchestrator"].wait_for(lambda: steps() > committed, RESTART_TIMEOUT)
        processes = {name: redis.process if name == "redis" else pods[name].process for name in names}
        for process in processes.values():
            os.kill(process.pid, signal.SIGTERM)
        for name, process in processes.items():
            # The orchestrator has not finished the run: 143 is the status that the chart's podFailurePolicy ignores.
            assert process.wait(END_TIMEOUT) == (143 if name == "orchestrator" else 0), name
        for name in names:
            if name == "redis":
                redis.start()
            else:
                pods[name] = start_process("quartet.services", name)

    drained = (*ROLES, "redis", "orchestrator")
    for name in drained:
        drain(name)
    # The only node of a cluster.
    drain(*drained)

    result = pods["orchestrator"].wait(RESTART_TIMEOUT)
    assert result.code == 0, result
    run = Run(result, tmp_path / "runs/tiny")
    assert step_metrics(run) == step_metrics(undisturbed)
    assert weights(run.directory) == weights(undisturbed.directory)
