"""Processes that die or stall in the middle of a run: restarted, to the undisturbed run's bits; or given up."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import LONGER, Run, Service, Start, deterministic_metrics, weights

ENDLESS = settings("run.steps=1000000", "checkpoint.every_steps=0")
WITHIN = 10.0
"""Seconds from Ctrl-C, or from the last of the restarts, to the end of the command."""


def wait_for_steps(command: Command, folder: Path, steps: int = 1) -> None:
    command.wait_for(lambda: committed_steps(folder / "runs" / "tiny") >= steps)


@pytest.mark.slow  # tests/chaos kills each process, at every moment of a step.
def test_a_run_whose_processes_are_killed_one_after_the_other_ends_with_the_same_bits(
    start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    command = start("train", config, *LONGER)
    before = {}
    for step, victim in enumerate(("actor", "critic", "reward", "redis", "orchestrator"), 1):
        wait_for_steps(command, tmp_path, step)
        before[victim] = command.child(victim)
        gently = victim == "critic"
        os.kill(before[victim], signal.SIGTERM if gently else signal.SIGKILL)
        end = "ended with status 0" if gently else "killed by SIGKILL"
        said = rf"{victim}: {end}; restarted \(1 of 5 in a row\)\n(.*\n)*{victim}: back after [\d.]+ s"
        command.wait_for(lambda said=said: re.search(said, command.out))
        assert command.child(victim) != before[victim]
    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert deterministic_metrics(Run(ended, tmp_path / "runs" / "tiny")) == deterministic_metrics(undisturbed)
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)
    steps = re.findall(r"^step (\d+)/8 ", ended.out, re.MULTILINE)
    assert steps == [str(step) for step in range(1, 9)], "a step is missing from what is shown, or shown twice"
    log = (tmp_path / "runs" / "tiny" / "logs" / "launcher.log").read_text()
    assert re.findall(r"event='process restarted' .*process='(\w+)'", log) == list(before)
    assert re.findall(r"event='process recovered' .*process='(\w+)'", log) == list(before)


def begun(command: Command, name: str) -> int:
    """The process id of a service that has just begun."""
    command.wait_for(lambda: any(line[3:5] == ["quartet.services", name] for line in command.processes().values()))
    return command.child(name)


def test_a_run_whose_processes_are_killed_while_they_start_begins_all_the_same(
    start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    command = start("train", config, *LONGER)
    for victim in ("critic", "critic", "orchestrator"):
        process = begun(command, victim)
        os.kill(process, signal.SIGKILL)
        command.wait_for(lambda process=process: process not in command.processes())
    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert re.findall(r"^(\w+): killed by SIGKILL; restarted \((\d) of 5 in a row\)$", ended.out, re.MULTILINE) == [
        ("critic", "1"),
        ("critic", "2"),
        ("orchestrator", "1"),
    ]
    assert deterministic_metrics(Run(ended, tmp_path / "runs" / "tiny")) == deterministic_metrics(undisturbed)
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)


def test_one_that_is_killed_at_every_start_is_given_up(start: Start, config: Path, frozen: Service) -> None:
    options = [*frozen.serving("reward", "reference"), *settings("recovery.max_restarts=1")]
    command = start("train", config, *options)
    os.kill(first := begun(command, "critic"), signal.SIGKILL)
    command.wait_for(lambda: first not in command.processes())
    os.kill(begun(command, "critic"), signal.SIGKILL)
    ended = command.ended(30)
    assert (ended.code, ended.left) == (1, [])
    assert re.match(r"error: critic: given up after 1 restart in \d+ s; killed by SIGKILL; ", ended.err), ended.err


def test_a_process_that_stalls_is_named_and_restarted_and_one_that_pauses_is_left_alone(
    start: Start, config: Path, frozen: Service, undisturbed: Run, tmp_path: Path
) -> None:
    stall = 4.0
    command = start(
        "train",
        config,
        *frozen.serving("reward", "reference"),
        *LONGER,
        *settings(f"recovery.hang_timeout_seconds={stall}"),
    )
    wait_for_steps(command, tmp_path)
    actor = command.child("actor")
    os.kill(actor, signal.SIGSTOP)
    time.sleep(stall / 4)  # A pause has to last for a while to be one.
    os.kill(actor, signal.SIGCONT)
    wait_for_steps(command, tmp_path, 3)
    critic = command.child("critic")
    os.kill(critic, signal.SIGSTOP)
    command.wait_for(lambda: "critic: back after" in command.out)
    assert (command.child("actor"), command.child("critic") != critic) == (actor, True)
    ended = command.ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    told = [line for line in ended.out.splitlines() if re.match("watchdog|actor|critic|redis|orchestrator", line)]
    assert told[:2] == [
        "watchdog: critic has not responded for 4 s (its process is stopped); killed",
        "critic: killed by SIGKILL; restarted (1 of 5 in a row)",
    ]
    assert len(told) == 3
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)


@pytest.mark.slow  # The test above has the same for a process that is killed at every start.
def test_a_process_that_dies_again_and_again_is_given_up_with_its_last_words(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    command = start(
        "train",
        config,
        *frozen.serving("reward", "reference"),
        *ENDLESS,
        *settings("recovery.max_restarts=1", "recovery.max_recoveries=100"),
    )
    wait_for_steps(command, tmp_path)
    os.kill(command.child("critic"), signal.SIGKILL)
    command.wait_for(lambda: "critic: back after" in command.out)
    os.kill(command.child("critic"), signal.SIGKILL)
    died = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - died < WITHIN
    assert (ended.code, ended.left) == (1, [])
    said = r"error: critic: given up after 1 restart in \d+ s; killed by SIGKILL; the last lines of (\S+):\n"
    match = re.match(said, ended.err)
    assert match, ended.err
    assert Path(match[1]) == Path("runs/tiny/logs/critic.log")
    assert "event='ready'" in ended.err


def test_ctrl_c_during_a_backoff_stops_everything_at_once(
    start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    command = start(
        "train", config, *frozen.serving("reward", "reference"), *ENDLESS, *settings("recovery.backoff_seconds=30")
    )
    wait_for_steps(command, tmp_path)
    os.kill(command.child("actor"), signal.SIGKILL)
    command.wait_for(lambda: "actor: killed by SIGKILL; restarted (1 of 5 in a row)" in command.out)
    command.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    ended = command.ended(30)
    assert time.monotonic() - asked < WITHIN
    assert (ended.code, ended.err, ended.left) == (130, "stopped\n", [])


def test_a_damaged_buffer_is_set_aside_on_resume_and_the_bits_are_the_same(
    start: Start, config: Path, frozen: Service, undisturbed: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *frozen.serving("reward", "reference"), *LONGER)
    wait_for_steps(command, tmp_path, 4)
    command.kill_everything()
    file = next(iter((run / "redis" / "appendonlydir").glob("*.incr.aof")))
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(1000) + data[len(data) // 2 + 1000 :])
    ended = start("train", config, *frozen.serving("reward", "reference"), *LONGER, "--resume").ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert "redis: its data is damaged, see runs/tiny/logs/redis.log; moved to runs/tiny/redis.damaged" in ended.out
    assert "note: resumed after step 3" in ended.out
    assert bytes(1000) in (run / "redis.damaged" / "appendonlydir" / file.name).read_bytes()
    assert deterministic_metrics(Run(ended, run)) == deterministic_metrics(undisturbed)
    assert weights(run) == weights(undisturbed.directory)
