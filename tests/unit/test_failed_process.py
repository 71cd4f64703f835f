"""A service process that has failed closes its roles in a limited time, and leaves no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quartet.demo

# Serves a role whose engine is dead, and two more: one that cannot be closed, and one whose close never ends. It has a process.
FAILING = """
import subprocess, sys, threading
from quartet.services import __main__ as services
from quartet.contract.status import Role, ServiceStatus
from quartet.rpc.compute_thread import ComputeThread

class Dead:
    compute = ComputeThread()

    def __init__(self, role, close):
        self.role, self.close = role, close

    def status(self):
        return ServiceStatus(self.role)

    def register(self, server):
        pass

    def failure(self):
        return "its engine is dead"

def fail():
    raise RuntimeError("no close")

child = subprocess.Popen(["sleep", "60"])
closed = threading.Event()
roles = [Dead(Role.ACTOR, fail), Dead(Role.CRITIC, closed.set), Dead(Role.REWARD, threading.Event().wait)]
services._models = lambda *_: roles
services.CHECK_INTERVAL, services.CLOSE_SECONDS = 0.01, 0.5
status = services.main(["actor", "critic", "reward", "--config", sys.argv[1], "--listen", "127.0.0.1:0"])
print(status, closed.is_set(), child.wait(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_dead_engine_that_does_not_close_keeps_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAILING, str(Path(quartet.demo.__file__).with_name("demo.yaml"))]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert "its engine is dead; this process ends" in result.stderr
    assert result.stdout.splitlines()[-1] == "1 True -9"
