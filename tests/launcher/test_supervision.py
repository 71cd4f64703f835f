"""Supervision of one real process: consecutive restarts, backoff, reset of the count, and the restart limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from quartet.config.deployment import RecoveryConfig
from quartet.errors import ServiceFailed
from quartet.launcher.supervisor import ProcessSupervisor, RestartCounter, exit_error
from quartet.system.child_processes import process_state
from tests.waiting import wait_until


def test_the_backoff_doubles_up_to_half_a_minute_and_ends_with_the_restarts() -> None:
    restarts = RestartCounter(RecoveryConfig(max_restarts=8, backoff_seconds=0.5))
    pauses = [restarts.next_pause(now=100.0 + number, uptime=0.0) for number in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert (restarts.consecutive, restarts.since) == (8, 100.0)


def test_a_long_uptime_resets_the_restart_count() -> None:
    restarts = RestartCounter(RecoveryConfig(max_restarts=2, backoff_seconds=0.5, restart_reset_seconds=60.0))
    assert [restarts.next_pause(now, uptime) for now, uptime in ((0.0, 5.0), (10.0, 59.9), (90.0, 60.0))] == [
        0.5,
        1.0,
        0.5,
    ]
    assert (restarts.consecutive, restarts.since) == (1, 90.0)


def test_zero_max_restarts_allows_no_restart() -> None:
    assert RestartCounter(RecoveryConfig(max_restarts=0)).next_pause(now=0.0, uptime=1e9) is None


class Echo:
    """Process that is ready when it prints "up", and responds unless it is suspended."""

    name = "echo"

    def __init__(self, log: Path) -> None:
        self.log, self.ready, self.starts, self.damage = log, False, 0, ""
        self.program = "print('up', flush=True); input()"
        self.start()

    def start(self) -> None:
        self.starts, self.ready = self.starts + 1, False
        with self.log.open("ab") as output:
            start = output.tell()
            self.process = subprocess.Popen([sys.executable, "-c", self.program], stdin=subprocess.PIPE, stdout=output)
        self._start = start

    def repair(self) -> str:
        damage, self.damage = self.damage, ""
        return damage

    def responds(self, timeout: float) -> bool:
        up = b"up" in self.log.read_bytes()[self._start :]
        self.ready = self.ready or up
        return up and not process_state(self.process.pid)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(tmp_path / "echo.log")
    yield echo
    echo.process.kill()
    echo.process.communicate()


def supervise(echo: Echo, load_timeout: float = 600.0, **recovery: float) -> ProcessSupervisor:
    wait_until(lambda: echo.responds(1.0))
    settings = RecoveryConfig.model_validate({"backoff_seconds": 0.05, **recovery})
    return ProcessSupervisor(echo, settings, load_timeout, structlog.wrap_logger(structlog.ReturnLogger()))


def lines_until(supervisor: ProcessSupervisor, wanted: str, seconds: float = 20.0) -> list[str]:
    """Return the messages up to one that matches ``wanted``."""
    deadline = time.monotonic() + seconds
    messages: list[str] = []
    while not any(re.search(wanted, line) for line in messages):
        assert time.monotonic() < deadline, messages
        started = time.monotonic()
        messages += supervisor.poll()
        assert time.monotonic() - started < 1.0, "poll must not wait"
        time.sleep(0.005)
    return messages


def test_a_process_that_is_stopped_while_it_loads_is_killed(echo: Echo) -> None:
    supervisor = supervise(echo, hang_timeout_seconds=0.3)
    echo.program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    kill(echo)
    stopped = r"watchdog: echo has not run for 0\.3 s \(its process is stopped\); killed"
    assert re.fullmatch(stopped, lines_until(supervisor, "killed$")[-1])
    echo.program = "print('up', flush=True); input()"
    lines_until(supervisor, "back")
    supervisor.stop()


def kill(echo: Echo) -> None:
    echo.process.kill()
    echo.process.communicate()


def test_a_process_that_ends_is_restarted_after_its_backoff(echo: Echo) -> None:
    supervisor = supervise(echo, backoff_seconds=0.3)
    assert supervisor.poll() == []
    kill(echo)
    killed_at = time.monotonic()
    assert supervisor.poll() == ["echo: killed by SIGKILL; restarted (1 of 5 in a row)"]
    assert supervisor.poll() == []
    assert echo.starts == 1
    assert re.fullmatch(r"echo: back after \d+\.\d s", lines_until(supervisor, "back")[-1])
    assert echo.starts == 2
    assert time.monotonic() - killed_at > 0.3
    supervisor.stop()


def test_a_process_that_exits_normally_is_restarted_too(echo: Echo) -> None:
    supervisor = supervise(echo)
    echo.process.communicate(b"\n")
    assert lines_until(supervisor, "back")[0] == "echo: ended with status 0; restarted (1 of 5 in a row)"
    supervisor.stop()


def test_a_process_without_restarts_left_is_given_up_with_its_log_tail(echo: Echo) -> None:
    supervisor = supervise(echo, max_restarts=2)
    for number in (1, 2):
        kill(echo)
        assert lines_until(supervisor, "back")[0].endswith(f"restarted ({number} of 2 in a row)")
    kill(echo)
    message = (
        rf"^echo: given up after 2 restarts in \d+ s \(.* 2\); killed by SIGKILL; the last lines of {echo.log}:\n  up"
    )
    with pytest.raises(ServiceFailed, match=message):
        supervisor.poll()
    supervisor.stop()


def test_the_error_of_a_process_with_an_empty_log_says_so(tmp_path: Path) -> None:
    silent = Echo(tmp_path / "silent.log")
    kill(silent)
    silent.log.write_text("")
    assert str(exit_error(silent)) == f"echo: killed by SIGKILL; its log {silent.log} is empty"


def test_a_process_that_crashes_at_its_start_does_not_reset_the_count(echo: Echo) -> None:
    supervisor = supervise(echo, max_restarts=3, restart_reset_seconds=0.001)
    echo.program = "raise SystemExit(3)"
    kill(echo)
    with pytest.raises(ServiceFailed, match=r"given up after 3 restarts in .* ended with status 3"):
        lines_until(supervisor, "back")
    assert echo.starts == 4
    supervisor.stop()


def test_a_process_that_hangs_is_killed_and_restarted(echo: Echo) -> None:
    supervisor = supervise(echo, hang_timeout_seconds=0.5)
    os.kill(echo.process.pid, signal.SIGSTOP)
    assert lines_until(supervisor, "back")[:2] == [
        "watchdog: echo has not responded for 0.5 s (its process is stopped); killed",
        "echo: killed by SIGKILL; restarted (1 of 5 in a row)",
    ]
    supervisor.stop()


def test_a_start_is_limited_by_the_load_timeout_and_not_by_the_hang_timeout(echo: Echo) -> None:
    supervisor = supervise(echo, hang_timeout_seconds=0.7, load_timeout=1.5)
    echo.program = "input()"
    kill(echo)
    started = time.monotonic()
    messages = lines_until(supervisor, "watchdog")
    assert time.monotonic() - started > 1.5
    assert messages[-1] == "watchdog: echo is not ready within timeouts.load_seconds 1.5 s; killed"
    supervisor.stop()


def test_a_repaired_process_is_restarted_immediately_without_counting(echo: Echo) -> None:
    supervisor = supervise(echo, max_restarts=1)
    echo.damage = "echo: its data is damaged"
    kill(echo)
    assert lines_until(supervisor, "back")[:-1] == ["echo: its data is damaged"]
    kill(echo)
    assert lines_until(supervisor, "back")[0].endswith("restarted (1 of 1 in a row)")
    supervisor.stop()
