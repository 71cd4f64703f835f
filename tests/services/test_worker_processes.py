"""The processes of a worker group: their ranks, their ends, and torchrun's environment variables."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from quartet.config.deployment import ServiceConfig
from quartet.contract.status import Role
from quartet.errors import ConfigError
from quartet.services.ranks.processes import MAX_REPORT_CHARACTERS, interface_towards, start_ranks
from tests.unit.system.test_child_processes import is_running
from tests.waiting import wait_until

PROGRAM = """
import importlib, os, sys, time
import torch
calls = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, lambda *_, name=name: calls.append(name) or 0)
from quartet.launcher.launcher import PRELOADED
for module in ("quartet.services.__main__", *PRELOADED):
    importlib.import_module(module)
print(calls, flush=True)

from quartet.config.deployment import ServiceConfig
from quartet.services.ranks.processes import start_ranks
from quartet.contract.status import Role
if not os.fork():
    ranks = start_ranks(Role.ACTOR, ServiceConfig(processes=4), {})
    if ranks.rank == 2:
        assert ranks.report("no memory: " + 5000 * chr(0x1F600), "OutOfMemory")
        os._exit(1)
    while not (failure := ranks.failure()):
        time.sleep(0.001)
    assert not ranks.report("rank 0 reports to no other", "")
    if ranks.rank == 0:
        print(failure, ranks.error[0][:11], len(ranks.error[0]), ranks.error[1], sep="|", flush=True)
    os._exit(0)
assert os.wait()[1] == 0

ranks = start_ranks(Role.ACTOR, ServiceConfig(processes=3), {})
if ranks.rank == 0:
    print(*ranks.children.values(), flush=True)
while not (failure := ranks.failure()):
    time.sleep(0.01)
print(failure, flush=True)
"""
"""Imports of a service, whose use of CUDA it prints, then a group with a failed rank, then a group of which a rank is killed."""


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers, which the ranks above 0 change."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_one_process_starts_no_other() -> None:
    ranks = start_ranks(Role.ACTOR, ServiceConfig(), {})
    assert (ranks.rank, ranks.size, ranks.children) == (0, 1, {})


@pytest.mark.slow
def test_ranks_are_forked_without_cuda_and_rank_0_reports_the_error_and_the_end_of_the_others() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[]\n", "an import uses CUDA"
        failure, error, length, kind = process.stdout.readline().strip().split("|")
        assert re.fullmatch(r"rank 2 of 4 \(process \d+\): ended with status 1", failure)
        assert (error, int(length), kind) == ("no memory: ", MAX_REPORT_CHARACTERS, "OutOfMemory")
        first, second = map(int, process.stdout.readline().split())
        os.kill(second, signal.SIGKILL)
        failure = process.stdout.readline().strip()
        assert failure == f"rank 2 of 3 (process {second}): killed by SIGKILL"
    wait_until(lambda: not is_running(first))


def test_ranks_are_not_forked_from_a_process_that_has_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA has started before the other ranks were forked"):
        start_ranks(Role.ACTOR, ServiceConfig(processes=2), {})


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "box", "MASTER_PORT": "29500"}


def test_torchrun_names_the_rank() -> None:
    ranks = start_ranks(Role.CRITIC, ServiceConfig(processes=2), TORCHRUN)
    assert (ranks.rank, ranks.size, ranks.host, ranks.port, ranks.children) == (1, 2, "box", 29500, {})


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_leaves_the_end_of_a_group_to_rank_0(rank: int) -> None:
    # A shell's background jobs ignore it already.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start_ranks(Role.CRITIC, ServiceConfig(processes=2), {**TORCHRUN, "RANK": str(rank)})
    for number in (signal.SIGTERM, signal.SIGINT):
        assert (signal.getsignal(number) is signal.SIG_IGN) == bool(rank)


@pytest.mark.parametrize(
    ("rank", "agent", "serves"), [("0", None, True), ("0", "False", True), ("0", "True", False), ("1", None, False)]
)
def test_rank_0_serves_the_store_if_torchruns_agent_does_not(rank: str, agent: str | None, serves: bool) -> None:
    environment = {**TORCHRUN, "RANK": rank} | ({} if agent is None else {"TORCHELASTIC_USE_AGENT_STORE": agent})
    assert start_ranks(Role.CRITIC, ServiceConfig(nodes=2), environment).serves_store is serves


def test_several_nodes_need_torchrun() -> None:
    message = "services.actor.nodes 2: the processes of several nodes are started by torchrun"
    with pytest.raises(ConfigError, match=message) as raised:
        start_ranks(Role.ACTOR, ServiceConfig(nodes=2, processes=3), {})
    assert "torchrun --nnodes 2 --node-rank NODE --nproc-per-node 3" in str(raised.value)


def test_ranks_of_one_machine_meet_over_its_loopback_interface() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("127.0.0.2") == "lo"
    assert interface_towards("no.such.host.invalid") == ""


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (2, {"MASTER_PORT": "rdzv"}, "MASTER_PORT 'rdzv': expected the number of a port"),
        (1, {}, "rank 1 of 2 processes, but the config gives 1 (services.critic.processes, or one per device)"),
        (3, {}, "the config gives 3"),
        (2, {"RANK": "2"}, "rank 2 of 2 processes"),
        (2, {"MASTER_PORT": ""}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT come together, MASTER_PORT is missing"),
    ],
)
def test_another_number_of_processes_than_torchrun_started_is_an_error(
    size: int, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        start_ranks(Role.CRITIC, ServiceConfig(processes=size), {**TORCHRUN, **changes})


@pytest.mark.parametrize(
    ("nodes", "processes", "local", "expected"),
    [(1, 2, "1", "gives 2 on each of 1"), (2, 1, "2", "gives 1 on each of 2")],
)
def test_another_number_of_processes_on_each_machine_than_torchrun_started_is_an_error(
    nodes: int, processes: int, local: str, expected: str
) -> None:
    service = ServiceConfig(nodes=nodes, processes=processes)
    with pytest.raises(ConfigError, match=rf"started {local} of 2 .* {expected} \(services.critic.nodes {nodes}\)"):
        start_ranks(Role.CRITIC, service, {**TORCHRUN, "LOCAL_WORLD_SIZE": local})
    ranks = start_ranks(Role.CRITIC, service, {**TORCHRUN, "LOCAL_WORLD_SIZE": str(processes)})
    assert (ranks.rank, ranks.size) == (1, 2)
