"""Processes that die or hang during a run are restarted, with bit-identical results, up to the restart limit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from quartet.run_directory.run_files import RunFiles
from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Run, Start, step_metrics, weights
from tests.waiting import LIMIT

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
SHUTDOWN_TIMEOUT = 10.0
"""Seconds from Ctrl-C, or from the death of a process without restarts left, to the end of the command."""


def wait_for_steps(command: Command, folder: Path, steps: int = 1) -> None:
    command.wait_for(lambda: committed_steps(folder / "runs" / "tiny") >= steps)


@pytest.mark.slow  # tests/chaos kills each process at every moment of a step.
def test_a_run_with_each_process_killed_once_ends_bit_identically(
    start: Start, config: Path, first_run: Run, tmp_path: Path
) -> None:
    command = start("train", config)
    before = {}
    for step, victim in enumerate(("actor", "critic", "reward", "redis", "orchestrator"), 1):
        wait_for_steps(command, tmp_path, step)
        before[victim] = command.child(victim)
        gently = victim == "critic"
        os.kill(before[victim], signal.SIGTERM if gently else signal.SIGKILL)
        end = "ended with status 0" if gently else "killed by SIGKILL"
        expected = rf"{victim}: {end}; restarted \(1 of 5 in a row\)\n(.*\n)*{victim}: back after [\d.]+ s"
        command.wait_for(lambda expected=expected: re.search(expected, command.out))
        assert command.child(victim) != before[victim]
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert step_metrics(Run(result, tmp_path / "runs" / "tiny")) == step_metrics(first_run)
    assert weights(tmp_path / "runs" / "tiny") == weights(first_run.directory)
    steps = re.findall(r"^step (\d+)/8 ", result.out, re.MULTILINE)
    assert steps == [str(step) for step in range(1, 9)], "a step is missing from what is shown, or shown twice"
    log = (tmp_path / "runs" / "tiny" / "logs" / "launcher.log").read_text()
    assert re.findall(r"event='process restarted' .*process='(\w+)'", log) == list(before)
    assert re.findall(r"event='process recovered' .*process='(\w+)'", log) == list(before)


def wait_for_start(command: Command, name: str) -> int:
    """Wait until a service process has started; return its process id."""
    command.wait_for(lambda: any(f"quartet.services {name} " in line for line in command.processes().values()))
    return command.child(name)


@pytest.mark.slow  # tests/chaos kills processes while they load.
def test_a_run_starts_although_processes_are_killed_while_they_load(
    start: Start, config: Path, first_run: Run, tmp_path: Path
) -> None:
    command = start("train", config)
    for victim in ("critic", "critic", "orchestrator"):
        process = wait_for_start(command, victim)
        os.kill(process, signal.SIGKILL)
        command.wait_for(lambda process=process: process not in command.processes())
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert re.findall(r"^(\w+): killed by SIGKILL; restarted \((\d) of 5 in a row\)$", result.out, re.MULTILINE) == [
        ("critic", "1"),
        ("critic", "2"),
        ("orchestrator", "1"),
    ]
    assert step_metrics(Run(result, tmp_path / "runs" / "tiny")) == step_metrics(first_run)
    assert weights(tmp_path / "runs" / "tiny") == weights(first_run.directory)


@pytest.mark.slow  # tests/launcher/test_supervision.py gives up a process that crashes at its start.
def test_a_process_killed_at_every_start_ends_the_run_at_the_restart_limit(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    options = [*few_processes, *settings("recovery.max_restarts=1")]
    command = start("train", config, *options)
    os.kill(first := wait_for_start(command, "critic"), signal.SIGKILL)
    command.wait_for(lambda: first not in command.processes())
    os.kill(wait_for_start(command, "critic"), signal.SIGKILL)
    result = command.wait(LIMIT)
    assert (result.code, result.leftovers) == (1, [])
    assert re.match(
        r"error: critic: given up after 1 restart in \d+ s \(recovery\.max_restarts 1\); killed by SIGKILL; ",
        result.err,
    ), result.err
    outcome = RunFiles(tmp_path / "runs" / "tiny").read_outcome()
    assert outcome is not None
    assert (outcome.error, outcome.service, outcome.exit_status) == ("ServiceFailed", "critic", 1)
    assert result.err.startswith(f"error: {outcome.message}")


@pytest.mark.slow  # tests/launcher/test_supervision.py hangs a process.
def test_a_hung_process_is_restarted_and_a_short_pause_is_tolerated(
    start: Start, config: Path, few_processes: list[str], first_run: Run, tmp_path: Path
) -> None:
    timeout = 4.0
    command = start(
        "train",
        config,
        *few_processes,
        *settings(f"recovery.hang_timeout_seconds={timeout}"),
    )
    wait_for_steps(command, tmp_path)
    actor = command.child("actor")
    os.kill(actor, signal.SIGSTOP)
    time.sleep(timeout / 4)  # A pause below the timeout.
    os.kill(actor, signal.SIGCONT)
    wait_for_steps(command, tmp_path, 3)
    critic = command.child("critic")
    os.kill(critic, signal.SIGSTOP)
    command.wait_for(lambda: "critic: back after" in command.out)
    assert (command.child("actor"), command.child("critic") != critic) == (actor, True)
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    lines = [line for line in result.out.splitlines() if re.match("watchdog|actor|critic|redis|orchestrator", line)]
    assert lines[:2] == [
        "watchdog: critic has not responded for 4 s (its process is stopped); killed",
        "critic: killed by SIGKILL; restarted (1 of 5 in a row)",
    ]
    assert len(lines) == 3
    assert weights(tmp_path / "runs" / "tiny") == weights(first_run.directory)


@pytest.mark.slow  # tests/launcher/test_supervision.py gives up a process without restarts left.
def test_a_process_that_dies_too_often_ends_the_run_and_its_log_is_shown(
    start: Start, config: Path, few_processes: list[str], tmp_path: Path
) -> None:
    command = start(
        "train",
        config,
        *few_processes,
        *ENDLESS,
        *settings("recovery.max_restarts=1", "recovery.max_recoveries=100"),
    )
    wait_for_steps(command, tmp_path)
    os.kill(command.child("critic"), signal.SIGKILL)
    command.wait_for(lambda: "critic: back after" in command.out)
    os.kill(command.child("critic"), signal.SIGKILL)
    death_time = time.monotonic()
    result = command.wait(LIMIT)
    assert time.monotonic() - death_time < SHUTDOWN_TIMEOUT
    assert (result.code, result.leftovers) == (1, [])
    expected = (
        r"error: critic: given up after 1 restart in \d+ s \(.* 1\); killed by SIGKILL; the last lines of (\S+):\n"
    )
    match = re.match(expected, result.err)
    assert match, result.err
    assert Path(match[1]) == Path("runs/tiny/logs/critic.log")
    assert "event='ready'" in result.err


@pytest.mark.slow  # tests/training/test_resume.py damages the experience.
def test_a_damaged_buffer_is_moved_away_on_resume_and_the_run_is_bit_identical(
    start: Start, config: Path, few_processes: list[str], first_run: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *few_processes)
    wait_for_steps(command, tmp_path, 4)
    command.kill_everything()
    file = next(iter((run / "redis" / "appendonlydir").glob("*.incr.aof")))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(1000) + data[len(data) // 2 + 1000 :])
    result = start("train", config, *few_processes, "--resume").wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert "redis: its data is damaged, see runs/tiny/logs/redis.log; moved to runs/tiny/redis.damaged" in result.out
    assert "note: resumed after step 3" in result.out
    assert bytes(1000) in (run / "redis.damaged" / "appendonlydir" / file.name).read_bytes()
    assert step_metrics(Run(result, run)) == step_metrics(first_run)
    assert weights(run) == weights(first_run.directory)
