"""Supervision of one real process: restarts in a row, backoff, what counts as calm, and the end of patience."""

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

from quartet.config import RecoveryConfig
from quartet.errors import ServiceFailed
from quartet.launcher.liveness import process_state
from quartet.launcher.supervisor import ProcessSupervisor, RestartCounter, exit_error


def test_the_backoff_doubles_up_to_half_a_minute_and_ends_with_the_restarts() -> None:
    restarts = RestartCounter(RecoveryConfig(max_restarts=8, backoff_seconds=0.5))
    waits = [restarts.next(now=100.0 + number, lasted=0.0) for number in range(9)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert (restarts.in_a_row, restarts.since) == (8, 100.0)


def test_restarts_are_counted_anew_after_a_calm_time() -> None:
    restarts = RestartCounter(RecoveryConfig(max_restarts=2, backoff_seconds=0.5, restart_reset_seconds=60.0))
    assert [restarts.next(now, lasted) for now, lasted in ((0.0, 5.0), (10.0, 59.9), (90.0, 60.0))] == [0.5, 1.0, 0.5]
    assert (restarts.in_a_row, restarts.since) == (1, 90.0)


def test_no_restarts_means_none() -> None:
    assert RestartCounter(RecoveryConfig(max_restarts=0)).next(now=0.0, lasted=1e9) is None


class Echo:
    """A process that is ready when it says so, and answers as long as it is not stopped."""

    name = "echo"

    def __init__(self, log: Path) -> None:
        self.log, self.ready, self.starts, self.damage = log, False, 0, ""
        self.program = "print('up', flush=True); input()"
        self.begin()

    def begin(self) -> None:
        self.starts, self.ready = self.starts + 1, False
        with self.log.open("ab") as output:
            said = output.tell()
            self.process = subprocess.Popen([sys.executable, "-c", self.program], stdin=subprocess.PIPE, stdout=output)
        self._said = said

    def repair(self) -> str:
        found, self.damage = self.damage, ""
        return found

    def answers(self, timeout: float) -> bool:
        up = b"up" in self.log.read_bytes()[self._said :]
        self.ready = self.ready or up
        return up and not process_state(self.process.pid)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    found = Echo(tmp_path / "echo.log")
    yield found
    found.process.kill()
    found.process.communicate()


def supervise(echo: Echo, load: float = 600.0, **recovery: float) -> ProcessSupervisor:
    wait_for_start(echo)
    settings = RecoveryConfig.model_validate({"backoff_seconds": 0.05, **recovery})
    return ProcessSupervisor(echo, settings, load, structlog.wrap_logger(structlog.ReturnLogger()))


def wait_for_start(echo: Echo) -> None:
    deadline = time.monotonic() + 20
    while not echo.answers(1.0):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_until(supervised: ProcessSupervisor, wanted: str, seconds: float = 20.0) -> list[str]:
    """What is told until a line matches."""
    deadline = time.monotonic() + seconds
    told: list[str] = []
    while not any(re.search(wanted, line) for line in told):
        assert time.monotonic() < deadline, told
        begun = time.monotonic()
        told += supervised.look()
        assert time.monotonic() - begun < 1.0, "it waited"
        time.sleep(0.005)
    return told


def end(echo: Echo) -> None:
    echo.process.kill()
    echo.process.communicate()


def test_what_ends_is_started_again_after_its_backoff(echo: Echo) -> None:
    supervised = supervise(echo, backoff_seconds=0.3)
    assert supervised.look() == []
    end(echo)
    died = time.monotonic()
    assert supervised.look() == ["echo: killed by SIGKILL; restarted (1 of 5 in a row)"]
    assert supervised.look() == []
    assert echo.starts == 1
    assert re.fullmatch(r"echo: back after \d+\.\d s", lines_until(supervised, "back")[-1])
    assert echo.starts == 2
    assert time.monotonic() - died > 0.3
    supervised.stop()


def test_an_end_in_order_is_an_end_too(echo: Echo) -> None:
    supervised = supervise(echo)
    echo.process.communicate(b"\n")
    assert lines_until(supervised, "back")[0] == "echo: ended with status 0; restarted (1 of 5 in a row)"
    supervised.stop()


def test_more_ends_than_restarts_give_it_up_with_the_last_lines_of_its_log(echo: Echo) -> None:
    supervised = supervise(echo, max_restarts=2)
    for number in (1, 2):
        end(echo)
        assert lines_until(supervised, "back")[0].endswith(f"restarted ({number} of 2 in a row)")
    end(echo)
    said = rf"^echo: given up after 2 restarts in \d+ s; killed by SIGKILL; the last lines of {echo.log}:\n  up"
    with pytest.raises(ServiceFailed, match=said):
        supervised.look()
    supervised.stop()


def test_one_that_said_nothing_is_given_up_without_lines_of_its_log(tmp_path: Path) -> None:
    silent = Echo(tmp_path / "silent.log")
    end(silent)
    silent.log.write_text("")
    assert str(exit_error(silent)) == f"echo: killed by SIGKILL; its log {silent.log} is empty"


def test_one_that_dies_as_soon_as_it_starts_does_not_get_calm(echo: Echo) -> None:
    supervised = supervise(echo, max_restarts=3, restart_reset_seconds=0.001)
    echo.program = "raise SystemExit(3)"
    end(echo)
    with pytest.raises(ServiceFailed, match=r"given up after 3 restarts in .* ended with status 3"):
        lines_until(supervised, "back")
    assert echo.starts == 4
    supervised.stop()


def test_what_does_not_answer_is_named_killed_and_restarted(echo: Echo) -> None:
    supervised = supervise(echo, hang_timeout_seconds=0.5)
    os.kill(echo.process.pid, signal.SIGSTOP)
    assert lines_until(supervised, "back")[:2] == [
        "watchdog: echo has not answered for 0.5 s (its process is stopped); killed",
        "echo: killed by SIGKILL; restarted (1 of 5 in a row)",
    ]
    supervised.stop()


def test_a_start_may_take_longer_than_a_stall_but_not_than_a_start(echo: Echo) -> None:
    supervised = supervise(echo, hang_timeout_seconds=0.7, load=1.5)
    echo.program = "input()"
    end(echo)
    begun = time.monotonic()
    told = lines_until(supervised, "watchdog")
    assert time.monotonic() - begun > 1.5
    assert told[-1] == "watchdog: echo is not ready within timeouts.load_seconds 1.5 s; killed"
    supervised.stop()


def test_what_could_be_mended_is_started_at_once_and_costs_no_restart(echo: Echo) -> None:
    supervised = supervise(echo, max_restarts=1)
    echo.damage = "echo: its data is damaged"
    end(echo)
    assert lines_until(supervised, "back")[:-1] == ["echo: its data is damaged"]
    end(echo)
    assert lines_until(supervised, "back")[0].endswith("restarted (1 of 1 in a row)")
    supervised.stop()
