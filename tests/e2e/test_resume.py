"""`quartet train --resume`: after a kill of everything at once, with and without its Redis, to the undisturbed run's bits."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import Command, committed_steps, settings
from tests.e2e.conftest import Run, Start

LENGTH = 8
LONGER = settings(f"run.steps={LENGTH}", "checkpoint.every=3")


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    from tests.e2e.commands import QUARTET

    command = Command(QUARTET, "train", config, *LONGER, cwd=folder)
    try:
        return Run(command.ended(), folder / "runs" / "tiny")
    finally:
        command.clean_up()


def figures(run: Run) -> list[dict[str, float]]:
    return [{name: step[name] for name in step if not name.startswith("seconds")} for step in run.metrics]


def weights(run: Path) -> bytes:
    return (run / "policy" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("redis", ["kept", "lost"])
def test_a_run_of_which_everything_was_killed_goes_on_to_the_same_bits(
    redis: str, start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "tiny"
    command = start("train", config, *LONGER)
    command.wait_for(lambda: committed_steps(run) >= 4)
    for pid in (command.process.pid, *command.processes()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    command.process.wait()
    deadline = time.monotonic() + 10
    while command.processes() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not (run / "policy").exists()
    if redis == "lost":
        shutil.rmtree(run / "redis")
    ended = start("train", config, *LONGER, "--resume").ended()
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert "note: going on after step" in ended.out
    assert figures(Run(ended, run)) == figures(undisturbed)
    assert weights(run) == weights(undisturbed.directory)


def test_what_cannot_be_resumed_is_refused(start: Start, config: Path, undisturbed: Run, tmp_path: Path) -> None:
    nothing = start("train", config, "--resume").ended()
    assert nothing.code == 2
    assert "--resume: runs/tiny holds no run" in nothing.err
    shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny", dirs_exist_ok=True)
    other = start("train", config, *LONGER, *settings("actor.learning_rate=0.5"), "--resume").ended()
    assert other.code == 2
    assert "--resume: actor.learning_rate is 0.5, the run in runs/tiny had 0.001" in other.err
    both = start("train", config, "--resume", "--overwrite").ended()
    assert both.code == 2
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)


def test_a_finished_run_can_be_made_longer(start: Start, config: Path, undisturbed: Run, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    first = start("train", config, *settings("run.steps=5", "checkpoint.every=3")).ended()
    assert first.code == 0, first
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["steps"] == 5
    ended = start("train", config, *LONGER, "--resume").ended()
    assert ended.code == 0, ended
    assert weights(run) == weights(undisturbed.directory)


def test_checkpoints_are_listed_and_verified(start: Start, undisturbed: Run, tmp_path: Path) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "copy")
    listed = start("checkpoints", "list", run).ended()
    assert listed.code == 0
    assert all(word in listed.out for word in ("6", "8", "MiB", "not verified"))
    verified = start("checkpoints", "verify", run).ended()
    assert (verified.code, verified.out.count("whole")) == (0, 2)
    (run / "checkpoints" / "step-000006" / "critic" / "config.json").write_text("{}")
    damaged = start("checkpoints", "verify", run).ended()
    assert damaged.code == 1
    assert "damaged" in damaged.out
    refused = start("rollback", run, "6").ended()
    assert refused.code == 2
    assert "critic/config.json is not as the manifest says; choose another step" in refused.err
    assert "there are: 6, 8" in start("rollback", run, "5").ended().err


def test_a_run_that_was_rolled_back_comes_to_the_same_end(
    start: Start, config: Path, undisturbed: Run, tmp_path: Path
) -> None:
    run = shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny")
    assert start("rollback", "runs/tiny", "6").ended().code == 0
    assert committed_steps(run) == 6
    assert not (run / "policy").exists()
    ended = start("train", config, *LONGER, "--resume").ended()
    assert ended.code == 0, ended
    assert weights(run) == weights(undisturbed.directory)
    assert figures(Run(ended, run)) == figures(undisturbed)


def test_a_branch_goes_on_from_an_old_checkpoint_with_other_settings(
    start: Start, undisturbed: Run, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed.directory, tmp_path / "runs" / "tiny")
    made = start("branch", "runs/tiny", "6", "--name", "faster", *settings("actor.learning_rate=0.01")).ended()
    assert (made.code, made.err) == (0, "")
    branch = tmp_path / "runs" / "faster"
    assert committed_steps(branch) == 6
    ended = start("train", branch / "config.yaml", "--resume").ended()
    assert ended.code == 0, ended
    rates = [step["learning_rate_actor"] for step in Run(ended, branch).metrics]
    assert rates == [1e-3] * 6 + [0.01] * 2
    assert weights(branch) != weights(undisturbed.directory)
    assert weights(tmp_path / "runs" / "tiny") == weights(undisturbed.directory)
    again = start("branch", "runs/tiny", "6", "--name", "faster").ended()
    assert again.code == 2
    assert "holds an earlier run" in again.err
