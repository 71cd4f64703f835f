"""Ranks of a worker group that hang, are suspended or are killed: each is named, and the run recovers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.e2e.commands import QUARTET, Command, settings
from tests.e2e.conftest import GROUPS, Run, step_metrics, weights

HANG_TIMEOUT = 3
RUN = Path("runs") / "tiny"
Held = Callable[[str], Command]


@pytest.fixture
def held(config: Path, few_processes: list[str], tmp_path: Path) -> Iterator[Held]:
    """Start a run that a failpoint holds, and return it when it is held."""
    commands: list[Command] = []
    folder = tmp_path / "failpoints"
    folder.mkdir()

    def hold(failpoint: str) -> Command:
        options = [*few_processes, *GROUPS, *settings(f"recovery.hang_timeout_seconds={HANG_TIMEOUT}")]
        environment = {VARIABLE: failpoint, FOLDER_VARIABLE: str(folder)}
        command = Command(QUARTET, "train", config, *options, cwd=tmp_path, environment=environment)
        commands.append(command)
        command.wait_for(lambda: list(folder.glob("*.reached")))
        return command

    yield hold
    for command in commands:
        command.clean_up()


def check_end(command: Command, undisturbed: Run, directory: Path) -> None:
    result = command.wait()
    assert (result.code, result.err, result.leftovers) == (0, "", [])
    assert step_metrics(Run(result, directory)) == step_metrics(undisturbed)
    assert weights(directory) == weights(undisturbed.directory)


@pytest.mark.parametrize(
    ("role", "rank"),
    [
        pytest.param("actor", 1, marks=pytest.mark.slow),
        pytest.param("critic", 1, marks=pytest.mark.slow),
        pytest.param("critic", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_run_ends_bit_identically(
    held: Held, group_run: Run, tmp_path: Path, role: str, rank: int
) -> None:
    command = held(f"{role}.stepping:{rank}=hold@10")
    process = command.child(role, rank)
    expected = (
        rf"{role}: ended with status 1 \({role}: rank {rank} of 2 \(process {process}\): no progress for {HANG_TIMEOUT} s in "
        r"update, micro-batch \d+, while the others wait in \w+; .*\); restarted \(1 of 5 in a row\)\n"
    )
    command.wait_for(lambda: re.search(expected, command.out), 3 * HANG_TIMEOUT)
    check_end(command, group_run, tmp_path / RUN)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_suspended_rank_is_named_and_the_run_ends_bit_identically(
    held: Held, group_run: Run, tmp_path: Path, rank: int
) -> None:
    command = held("orchestrator.sealed=hold@3")
    process = command.child("actor", rank)
    os.kill(process, signal.SIGSTOP)
    (tmp_path / "failpoints" / "orchestrator.sealed.go").touch()
    expected = (
        r"watchdog: actor has not responded for 3 s \(its process is stopped\); killed"
        if rank == 0
        else rf"rank 1 of 2 \(process {process}\): no progress for {HANG_TIMEOUT} s in .* \(its process is stopped\)"
    )
    command.wait_for(lambda: re.search(expected, command.out), 3 * HANG_TIMEOUT)
    check_end(command, group_run, tmp_path / RUN)


@pytest.mark.slow
def test_the_error_of_a_call_names_the_rank_that_was_killed(held: Held, group_run: Run, tmp_path: Path) -> None:
    command = held("actor.stepping:1=hold@4")
    process = command.child("actor", 1)
    os.kill(process, signal.SIGKILL)
    error = f"Update: rank 1 of 2 (process {process}): killed by SIGKILL"
    command.wait_for(lambda: re.search(rf"note: recovering: actor at [\d.:]+: {re.escape(error)}\n", command.out))
    check_end(command, group_run, tmp_path / RUN)
