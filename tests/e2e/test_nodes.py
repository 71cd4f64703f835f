"""A worker group on two nodes, started by torchrun. Both nodes are on this machine, at separate addresses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import QUARTET, Command, committed_steps, settings
from tests.e2e.conftest import GROUPS, Run, Service, Start, step_metrics, weights
from tests.ports import free_ports
from tests.waiting import LIMIT, wait_until

Node = Callable[[int], Command]
REPORTED_LOSS = r"rank 1( of 2 \(process \d+\): no (sign of life|progress)|: actor at .* unavailable)"
"""Rank 0 notices the loss of rank 1 in the next collective or generation, or if there is none, after the time limit."""


class Nodes:
    """Two nodes with one rank of the actor each."""

    def __init__(self, config: Path, redis: str, folder: Path) -> None:
        self._config, self._folder = config, folder
        service, self._store = free_ports(2)
        self.options = settings(
            f"buffer.url={redis}", f"services.actor.address=127.0.0.1:{service}", "services.actor.nodes=2"
        )
        self._agents: list[Command] = []

    def start(self, number: int, *before: str) -> Command:
        """Start torchrun on a node. ``before``: a command that starts it."""
        torchrun = (
            f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {self._store}"
        )
        agent = Command(
            *before,
            QUARTET.with_name("torchrun"),
            *torchrun.split(),
            *f"--local-addr 127.0.0.{number + 1} --max-restarts 9 --monitor-interval 0.1".split(),
            *("-m", "quartet.services", "actor", "--config", self._config, *self.options),
            cwd=self._folder,
        )
        self._agents.append(agent)
        return agent

    def close(self) -> None:
        for agent in self._agents:
            agent.clean_up()


@pytest.fixture
def nodes(config: Path, frozen: Service, tmp_path: Path) -> Iterator[Nodes]:
    both = Nodes(config, frozen.redis, tmp_path)
    yield both
    both.close()


def lose(node: Command) -> None:
    """Kill everything on a node at once."""
    os.killpg(node.process.pid, signal.SIGKILL)
    node.process.wait()
    wait_until(lambda: not node.processes(), node.processes)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_run_continues_after_the_loss_of_a_node_and_ends_bit_identically(
    start: Start, config: Path, nodes: Nodes, frozen: Service, group_run: Run, tmp_path: Path, lost: int
) -> None:
    nodes.options += settings("recovery.hang_timeout_seconds=20")
    agents = [nodes.start(0), nodes.start(1)]
    run = tmp_path / "runs" / "tiny"
    options = [*frozen.serving("reward", "reference"), *settings("gateway.enabled=false"), *GROUPS[2:]]
    command = start("train", config, *options, *nodes.options)
    command.wait_for(lambda: committed_steps(run) >= 2)
    lose(agents[lost])
    other = agents[1 - lost]
    pattern = REPORTED_LOSS if lost else r"Connection closed by peer|Connection reset|no sign of life"
    other.wait_for(lambda: re.search(pattern, other.err))
    if not lost:
        # The store of node 0 is lost, too, so torchrun ends on every node. A supervisor starts it again.
        assert other.process.wait(LIMIT), other.err
        nodes.start(1)
    nodes.start(lost)
    result = command.wait(LIMIT)
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert "note: recovering: actor at" in result.out
    assert step_metrics(Run(result, run)) == step_metrics(group_run)
    assert weights(run) == weights(group_run.directory)


@pytest.mark.slow
def test_a_run_continues_after_the_loss_of_a_node_in_a_generation(
    start: Start, config: Path, nodes: Nodes, frozen: Service, group_run: Run, tmp_path: Path
) -> None:
    held = f"{VARIABLE}=actor.generating:1=hold@2", f"{FOLDER_VARIABLE}={tmp_path}"
    first, second = nodes.start(0), nodes.start(1, "env", *held)
    options = [*frozen.serving("reward", "reference"), *settings("gateway.enabled=false"), *GROUPS[2:]]
    command = start("train", config, *options, *nodes.options)
    command.wait_for((tmp_path / "actor.generating.reached").exists)
    lose(second)
    # No collective and no time limit: the call of rank 0 fails.
    first.wait_for(lambda: re.search(r"rank 1: actor at .* unavailable.* this process ends", first.err))
    nodes.start(1)
    result = command.wait(LIMIT)
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(group_run)
    assert weights(run.directory) == weights(group_run.directory)


ISOLATED = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A command for processes that cannot map memory of others, as on another machine."""


@pytest.fixture
def isolated() -> tuple[str, ...]:
    for command in (ISOLATED, (*ISOLATED, "--user", "--map-root-user")):
        if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            return command
    pytest.skip("this system allows no namespaces")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_generators_get_the_policy_of_ranks_on_two_machines(
    start: Start,
    config: Path,
    nodes: Nodes,
    frozen: Service,
    group_run: Run,
    isolated: tuple[str, ...],
    tmp_path: Path,
    lost: bool,
) -> None:
    nodes.options += settings(
        "rollout.generators=2",
        "services.generator.num_threads=1",
        f"rollout.process_group={'none' if lost else 'gloo'}",
        "recovery.hang_timeout_seconds=20",
    )
    first, second = nodes.start(0), nodes.start(1, *isolated)
    options = [*frozen.serving("reward", "reference"), *settings("gateway.enabled=false"), *GROUPS[2:]]
    command = start("train", config, *options, *nodes.options)
    if lost:
        command.wait_for(lambda: committed_steps(tmp_path / "runs" / "tiny") >= 2)
        lose(second)
        first.wait_for(lambda: re.search(REPORTED_LOSS, first.err))
        nodes.start(1, *isolated)
    result = command.wait(LIMIT)
    assert (result.code, result.err, result.leftovers) == (0, "", []), result
    run = Run(result, tmp_path / "runs" / "tiny")
    assert step_metrics(run) == step_metrics(group_run)
    assert weights(run.directory) == weights(group_run.directory)
    logs = [path.read_text() for path in sorted((run.directory / "logs").glob("generator*.log"))]
    ways = [set(re.findall("event='weights loaded'.* way='(.*)'", log)) for log in logs]
    if lost:
        assert set().union(*ways) <= {"shared memory", "full", "delta"}
    else:
        # One generator has the policy from the trainer, and the other maps its copy.
        assert sorted(ways, key=min) == [{"process group"}, {"shared memory"}]
