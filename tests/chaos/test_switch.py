"""SIGKILL of all processes before and after a switch of the reward source: the run ends with the same bits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml

from quartet.system.failpoints import FOLDER_VARIABLE, VARIABLE
from tests.chaos.runs import RUN, ChaosSetup, differences, train
from tests.e2e.commands import QUARTET, Command
from tests.waiting import LIMIT

COMMANDED, KILLED = "orchestrator.sealed", "orchestrator.updated"
"""Failpoints at which the run is held: in step 2, when the switch is commanded, and in step 4, after it."""
SWITCH = ("reward.parts.old.weight=0", "reward.parts.new.weight=1")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> ChaosSetup:
    setup = ChaosSetup(tmp_path_factory.mktemp("chaos-switch"))
    tree = yaml.safe_load(setup.config.read_text())
    new = {"name": "new", "weight": 0.0, "source": "function", "function": "quartet.rewards.examples:length_target"}
    tree["reward"] = {"source": "ensemble", "parts": [{"name": "old", **tree["reward"]}, new]}
    setup.config.write_text(yaml.safe_dump(tree))
    return setup


def switched_run(config: Path, folder: Path, kill_at: str) -> Path:
    """Run with a switch from step 3 on, and kill everything at ``kill_at``, if given. Return the directory of the run."""
    failpoints, directory = folder / "failpoints", folder / "runs" / RUN
    failpoints.mkdir()
    second = f",{KILLED}=hold@4" if kill_at == KILLED else ""
    environment = {VARIABLE: f"{COMMANDED}=hold@2{second}", FOLDER_VARIABLE: str(failpoints)}
    commands = [Command(QUARTET, *train(config, 1), cwd=folder, environment=environment)]

    def release_or_kill(name: str) -> None:
        if name == kill_at:
            commands[-1].kill_everything()
            commands.append(Command(QUARTET, *train(config, 1), "--resume", cwd=folder, environment=environment))
        (failpoints / f"{name}.go").touch()

    try:
        commands[-1].wait_for((failpoints / f"{COMMANDED}.reached").exists)
        commands[-1].wait_for((directory / "gateway.json").exists)
        switch = Command(QUARTET, "set", directory, *SWITCH, cwd=folder)
        try:
            result = switch.wait(LIMIT)
        finally:
            switch.clean_up()
        assert result.code == 0, result
        assert "from step 3 on" in result.out
        release_or_kill(COMMANDED)
        if kill_at == KILLED:
            commands[-1].wait_for((failpoints / f"{KILLED}.reached").exists)
            release_or_kill(KILLED)
        ended = commands[-1].wait(LIMIT)
        assert (ended.code, ended.leftovers) == (0, []), ended
    finally:
        for command in commands:
            command.clean_up()
    return directory


@pytest.mark.slow
def test_a_run_that_is_killed_before_or_after_a_switch_is_bit_identical(setup: ChaosSetup) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        runs = []
        for name in ("", COMMANDED, KILLED):
            own = Path(folder) / f"run-{name}"
            own.mkdir()
            runs.append(switched_run(setup.config, own, name))
        undisturbed, *killed = runs
        for run in killed:
            assert list(differences(run, undisturbed)) == []
