"""Runs whose responses come from generator processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.commands import QUARTET, Command, CommandResult, settings
from tests.e2e.conftest import Run, step_metrics, train, weights

KILLS = 100


@pytest.mark.slow  # test_turns.py has generators, tests/training/test_wide_models.py compares them in one process.
def test_two_generators_with_certificates_train_the_same_policy_as_the_actor(
    config: Path, tmp_path: Path, first_run: Run
) -> None:
    subprocess.run([QUARTET, "certificates", tmp_path / "certificates"], capture_output=True, check=True)
    options = settings(
        "rollout.generators=2",
        "services.generator.num_threads=1",
        f"services.generator.python={sys.executable}",
        f"security.certificates={tmp_path / 'certificates'}",
        "gateway.enabled=false",
    )
    run = train(tmp_path, config, *options)
    assert run.result.code == 0, run.result
    assert weights(run.directory) == weights(first_run.directory)
    assert step_metrics(run) == step_metrics(first_run)
    logs = [(run.directory / "logs" / f"generator-{index}.log").read_text() for index in range(2)]
    assert all("event='ready'" in log for log in logs)
    launcher = (run.directory / "logs" / "launcher.log").read_text()
    assert "restarted" not in launcher


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_hundred_kills_of_generators_change_no_bit_and_no_trajectory(
    config: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = settings("run.steps=250", "checkpoint.every_steps=50", "gateway.enabled=false")
    undisturbed = train(tmp_path_factory.mktemp("undisturbed"), config, *options)
    assert undisturbed.result.code == 0, undisturbed.result
    folder = tmp_path_factory.mktemp("killed")
    recovery = settings(
        "rollout.generators=4",
        "recovery.max_restarts=1000",
        "recovery.max_recoveries=1000",
        "recovery.backoff_seconds=0.01",
        "recovery.restart_reset_seconds=0.01",
    )
    command = Command(QUARTET, "train", config, *options, *recovery, cwd=folder)
    run = Run(CommandResult(0, "", "", 0.0, []), folder / "runs" / "tiny")
    try:
        kills = kill_generators(run.directory, command, random.Random(0))
        result = command.wait(1200)
    finally:
        command.clean_up()
    assert result.code == 0, result
    assert kills == KILLS, "the run ended before all kills"
    assert weights(run.directory) == weights(undisturbed.directory)
    assert step_metrics(run) == step_metrics(undisturbed)
    for path in sorted((undisturbed.directory / "trajectories").iterdir()):
        ids = [
            json.loads(line)["id"] for line in (run.directory / "trajectories" / path.name).read_bytes().splitlines()
        ]
        assert len(ids) == len(set(ids)) == 8


def kill_generators(run: Path, command: Command, chance: random.Random) -> int:
    """Kill random generators of a run, once it has taken a step, until ``KILLS`` or the end. Return the number of kills."""
    metrics, kills = run / "metrics.jsonl", 0
    while kills < KILLS and command.process.poll() is None:
        if metrics.exists() and metrics.stat().st_size and (generators := generators_of(command)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(generators), signal.SIGKILL)
                kills += 1
        time.sleep(chance.uniform(0.05, 0.6))
    return kills


def generators_of(command: Command) -> list[int]:
    """Return the process ids of a run's generators."""
    return [pid for pid, line in command.processes().items() if "quartet.services generator " in line]
