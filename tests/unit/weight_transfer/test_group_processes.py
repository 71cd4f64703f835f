"""Receivers in processes of their own, which are killed or stopped while ranks send to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.weights import WeightRole
from quartet.rpc.base_servicers import WeightServicer
from quartet.rpc.server import Server
from quartet.system.child_processes import tied_to_parent
from quartet.weight_transfer.process_group import GroupSettings
from tests.unit.weight_transfer.ranks import Trainer
from tests.unit.weight_transfer.samples import RUN, Tensors, digest, tensor
from tests.unit.weight_transfer.test_process_group import left
from tests.waiting import wait_until

GROUP = GroupSettings(timeout=2.0)
SECONDS = 0.03
"""Longest time of a transfer before its receiver is killed or stopped. All of it takes about that long."""


class Receiver:
    """A process that pulls from ``address``."""

    def __init__(self, address: str) -> None:
        module = ["-m", "tests.unit.weight_transfer.receiving_process", address, str(GROUP.timeout)]
        self._process = subprocess.Popen(
            tied_to_parent([sys.executable, *module]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    def ask(self, version: int, tensors: Tensors) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{version} {digest(tensors).hex()}\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer(2, group=GROUP)
    yield trainer
    trainer.close()


@pytest.fixture
def server(trainer: Trainer) -> Iterator[Server]:
    server = Server([WeightRole(WeightServicer(trainer.source))], "127.0.0.1:0")
    yield server
    server.stop(0.0)


@pytest.mark.slow
def test_receivers_that_are_killed_or_stopped_or_join_touch_no_other_transfer(trainer: Trainer, server: Server) -> None:
    schedule, tensors = random.Random(), {"a": tensor((16, 2**18)), "b": tensor((3, 5))}
    receivers = [Receiver(server.address) for _ in range(4)]
    try:
        assert [each.answer() for each in receivers] == ["ready"] * len(receivers)
        witness, killed, stopped, newcomer = receivers
        for number, (victim, signal_number) in enumerate(((killed, signal.SIGKILL), (stopped, signal.SIGSTOP))):
            tensors["a"].data[:100] = number
            start = time.monotonic()
            trainer.publish(number, tensors, RUN)
            assert time.monotonic() - start < GROUP.timeout, "a publication must not wait for a receiver"
            witness.ask(number, tensors)
            victim.ask(number, tensors)
            time.sleep(schedule.uniform(0.0, SECONDS))
            victim.signal(signal_number)
            assert witness.answer() == "process group"
        newcomer.ask(number, tensors)
        assert newcomer.answer() == "process group"
        # The ranks send nothing to the receiver that was stopped, although it still lives.
        assert wait_until(lambda: sending() == 0)
        for each in (killed, stopped, newcomer):
            each.end()
        before = left()
        witness.ask(number, tensors)
        assert witness.answer() == "process group"
        assert wait_until(lambda: left() <= before), (left(), before)
    finally:
        for each in receivers:
            each.end()


def sending() -> int:
    """Return the number of threads that send weights."""
    return sum(each.name == "weight sender" for each in threading.enumerate())
