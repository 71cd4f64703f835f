"""Processes that die, and people who press Ctrl-C: the run ends soon, says why, and leaves nothing running."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.commands import Command, committed_steps, settings, wait_until
from tests.e2e.conftest import Service, Start

ENDLESS = settings("run.steps=1000000", "checkpoint.every=0")
WITHIN = 10.0
"""Seconds from a death, or from Ctrl-C, to the end of the command."""


def wait_for_steps(command: Command, folder: Path, steps: int = 1) -> None:
    command.wait_for(lambda: committed_steps(folder / "runs" / "tiny") >= steps)


@pytest.mark.parametrize(
    ("victim", "said", "by_address"),
    [
        ("actor", "actor: killed by SIGKILL; the last lines of", ["reward", "reference"]),
        ("reward", "reward: killed by SIGKILL; the last lines of", ["reference"]),
        ("orchestrator", "orchestrator: killed by SIGKILL; the last lines of", ["reward", "reference"]),
        ("redis", "redis: ended; the last lines of its log", ["reward", "reference"]),
    ],
)
def test_a_process_that_dies_ends_the_run_with_its_name_and_last_words(
    victim: str, said: str, by_address: list[str], start: Start, config: Path, frozen: Service, tmp_path: Path
) -> None:
    command = start("train", config, *frozen.serving(*by_address), *ENDLESS)
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
    assert not (tmp_path / "runs" / "tiny" / "policy").exists()


def starting(command: Command) -> bool:
    """Whether Redis and the services that are to be started here have been, and are still loading."""
    lines = list(command.processes().values())
    return any("redis.sock" in line[0] for line in lines) and all(
        ["-m", "services", role] in [line[1:4] for line in lines] for role in ("actor", "critic")
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
