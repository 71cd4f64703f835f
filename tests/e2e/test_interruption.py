"""Dead processes, signals and Ctrl-C: the run ends soon, says why, and leaves no process running."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Call, Service, Start
from tests.ports import free_port
from tests.waiting import LIMIT, wait_until

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
SHUTDOWN_TIMEOUT = 10.0
"""Seconds from the death of a process, or from Ctrl-C, to the end of the command."""


def wait_for_steps(command: Command, folder: Path, steps: int = 1) -> None:
    command.wait_for(lambda: committed_steps(folder / "runs" / "tiny") >= steps)


def test_without_restarts_a_run_continues_without_its_gateway_and_a_dead_process_ends_it_with_its_log(
    start: Start, call: Call, config: Path, frozen: Service, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    no_restarts = settings("recovery.max_restarts=0")
    command = start("train", config, *frozen.serving("reward", "reference"), *ENDLESS, *no_restarts)
    command.wait_for(lambda: "dashboard: " in command.out)
    os.kill(command.child("gateway"), signal.SIGKILL)
    without = "gateway: killed by SIGKILL; the run continues without it, see runs/tiny/logs/gateway.log"
    command.wait_for(lambda: without in command.out.splitlines())
    wait_for_steps(command, tmp_path, committed_steps(run) + 2)
    (run / "gateway.json").unlink()
    refused = call("stop", "runs/tiny")
    assert refused.code == 2
    assert refused.err.startswith("error: run runs/tiny: is active but has no gateway")
    os.kill(command.child("actor"), signal.SIGKILL)
    death_time = time.monotonic()
    result = command.wait(LIMIT)
    assert time.monotonic() - death_time < SHUTDOWN_TIMEOUT
    assert result.code == 1, result
    assert result.err.startswith("error: actor: killed by SIGKILL; the last lines of")
    log = (run / "logs" / "actor.log").read_text().splitlines()
    assert any(line in result.err for line in log), "no line of its log is shown"
    assert "Traceback" not in result.err
    assert result.leftovers == []
    assert not (run / "policy").exists()


def test_a_terminal_shows_reward_kl_throughput_and_time_left_and_ctrl_c_during_a_backoff_stops_everything(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    backoff = settings("recovery.backoff_seconds=30")
    command = start("train", config, *few_processes, *ENDLESS, *backoff, terminal=True)
    wait_for_steps(command, tmp_path, steps=2)
    for shown in (
        r"tiny .* \d+/1000000",
        r"left [\d:]+\d\d",
        r"reward +[+-]\d+\.\d{3}",
        r"KL, nats per response +-?\d+\.\d{3}",
        r"tokens per second +[1-9]\d*",
    ):
        command.wait_for(lambda shown=shown: re.search(shown, command.out), 10)
    os.kill(command.child("actor"), signal.SIGKILL)
    command.wait_for(lambda: "actor: killed by SIGKILL; restarted (1 of 5 in a row)" in command.out)
    command.type("\x03")
    interrupt_time = time.monotonic()
    result = command.wait(LIMIT)
    assert time.monotonic() - interrupt_time < SHUTDOWN_TIMEOUT
    assert result.code == 130
    assert "to continue: quartet train runs/tiny/config.yaml --resume" in result.out
    assert result.out.rstrip().endswith("stopped")
    assert "Traceback" not in result.out
    assert result.leftovers == []
    log = (tmp_path / "runs" / "tiny" / "logs" / "critic.log").read_text()
    assert "event='stopped'" in log, "the critic was killed rather than drained"
    assert not (tmp_path / "runs" / "tiny" / "policy").exists()


def is_loading(command: Command) -> bool:
    """Return whether the command has started Redis and its services, which then load their models."""
    lines = list(command.processes().values())
    return all(
        any(part in line for line in lines)
        for part in ("redis.sock", "quartet.services actor ", "quartet.services critic ")
    )


def test_sigterm_while_the_services_start_stops_everything(
    start: Start, config: Path, few_processes: list[str]
) -> None:
    command = start("train", config, *few_processes)
    command.wait_for(lambda: is_loading(command))
    command.process.terminate()
    signal_time = time.monotonic()
    result = command.wait(LIMIT)
    assert time.monotonic() - signal_time < SHUTDOWN_TIMEOUT
    assert (result.code, result.err) == (130, "stopped\n")
    # The kernel ends a service that has started just before the signal, at which the command did not know it.
    wait_until(lambda: not command.processes(), command.processes)
    assert [left for left in result.leftovers if left.startswith("/")] == []


def test_a_service_with_a_blocked_log_pipe_drains_and_ends_on_sigterm(config: Path, tmp_path: Path) -> None:
    port = free_port()
    log, end = os.pipe()
    os.write(end, b" " * fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096))  # The pipe is full, so the next log line blocks.
    arguments = ("-m", "quartet.services", "reward", "--config", config, "--listen", f"127.0.0.1:{port}")
    service = Command(sys.executable, *arguments, cwd=tmp_path, err=end)
    try:
        os.close(end)
        wait_until(lambda: is_serving(port))
        with suppress(AssertionError):  # Not every kernel shows what a process waits for.
            wait_until(lambda: "pipe" in Path(f"/proc/{service.process.pid}/wchan").read_text())
        service.process.terminate()
        with os.fdopen(log, encoding="utf-8") as lines:
            assert any("event='stopped'" in line for line in lines)
        assert service.process.wait(LIMIT) == 0
    finally:
        service.clean_up()


def is_serving(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return True
