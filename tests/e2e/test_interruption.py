"""Processes that die, and people who press Ctrl-C: the run ends soon, says why, and leaves nothing running."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.commands import START, Command, committed_steps, settings, wait_until
from tests.e2e.conftest import Service, Start

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
WITHIN = 10.0
"""Seconds from a death, or from Ctrl-C, to the end of the command."""


def wait_for_steps(command: Command, folder: Path, steps: int = 1) -> None:
    command.wait_for(lambda: committed_steps(folder / "runs" / "tiny") >= steps)


@pytest.mark.parametrize(
    ("victim", "said"),
    [
        ("actor", "actor: killed by SIGKILL; the last lines of"),
        ("critic", "critic: killed by SIGKILL; the last lines of"),
        ("orchestrator", "orchestrator: killed by SIGKILL; the last lines of"),
        ("redis", "redis: killed by SIGKILL; the last lines of"),
    ],
)
@pytest.mark.sampled(2)
def test_without_restarts_a_process_that_dies_ends_the_run_with_its_name_and_last_words(
    victim: str, said: str, start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    none = settings("recovery.max_restarts=0")
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS, *none)
    wait_for_steps(command, tmp_path)
    os.kill(command.child(victim), signal.SIGKILL)
    died = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - died < WITHIN
    assert ended.code == 1, ended
    assert ended.err.startswith(f"error: {said}")
    log = (tmp_path / "runs" / "tiny" / "logs" / f"{victim}.log").read_text().splitlines()
    assert any(line in ended.err for line in log), "no line of its log is shown"
    assert "Traceback" not in ended.err
    assert ended.left == []
    assert not (tmp_path / "runs" / "tiny" / "policy").exists()


def test_a_terminal_shows_reward_kl_pace_and_time_left_and_ctrl_c_stops_everything(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS, terminal=True)
    wait_for_steps(command, tmp_path, steps=2)
    for shown in (
        r"tiny .* \d+/1000000",
        r"left [\d:]+\d\d",
        r"reward +[+-]\d+\.\d{3}",
        r"KL, nats per response +-?\d+\.\d{3}",
        r"tokens per second +[1-9]\d*",
    ):
        command.wait_for(lambda shown=shown: re.search(shown, command.out), 10)
    command.type("\x03")
    pressed = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - pressed < WITHIN
    assert ended.code == 130
    assert ended.out.rstrip().endswith("stopped")
    assert "Traceback" not in ended.out
    assert ended.left == []
    for role in ("actor", "critic"):
        log = (tmp_path / "runs" / "tiny" / "logs" / f"{role}.log").read_text()
        assert "event='stopped'" in log, f"the {role} was killed rather than drained"
    assert not (tmp_path / "runs" / "tiny" / "policy").exists()


def starting(command: Command) -> bool:
    """Return whether Redis and the services that are to be started here have been, and are still loading."""
    lines = list(command.processes().values())
    return any("redis.sock" in line[0] for line in lines) and all(
        ["-P", "-m", "quartet.services", role] in [line[1:5] for line in lines] for role in ("actor", "critic")
    )


def test_sigterm_while_the_services_start_stops_everything(start: Start, config: Path, frozen: Service) -> None:
    command = start("train", config, *frozen.serving("reward", "reference"))
    command.wait_for(lambda: starting(command))
    command.process.terminate()
    asked = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - asked < WITHIN
    assert (ended.code, ended.err, ended.left) == (130, "stopped\n", [])


def test_sigkill_of_the_command_takes_every_child_with_it(start: Start, config: Path, frozen: Service) -> None:
    command = start("train", config, *frozen.serving("reward", "reference"))
    command.wait_for(lambda: starting(command))
    command.process.kill()
    assert wait_until(lambda: not command.processes(), 5), command.processes()


def test_a_service_told_to_stop_in_the_middle_of_a_log_line_drains_and_ends(config: Path) -> None:
    port = free_port()
    log, end = os.pipe()
    os.write(end, b" " * fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096))  # Full: the next line has to wait.
    command = [
        sys.executable,
        "-m",
        "quartet.services",
        "reward",
        "--config",
        str(config),
        "--listen",
        f"127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stderr=end) as service:
        try:
            os.close(end)
            assert wait_until(lambda: serves(port), START)
            wait_until(lambda: "pipe" in Path(f"/proc/{service.pid}/wchan").read_text(), 2)
            service.terminate()
            with os.fdopen(log, encoding="utf-8") as lines:
                assert wait_until(lambda: "event='stopped'" in lines.readline(), 20)
            assert service.wait(20) == 0
        finally:
            service.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serves(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return True
