"""The Python API: train in a process, look at the run, control it, and generate with it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import quartet
from quartet.errors import ConfigError
from quartet.launcher import launcher
from tests.e2e.commands import Command, committed_steps
from tests.e2e.conftest import SAVED, STEPS, Service
from tests.e2e.forked_program import OwnForkServer
from tests.e2e.test_interruption import is_loading
from tests.preflight_workers import run_here
from tests.waiting import LIMIT, wait_until

LONG = ["run.steps=100000", "checkpoint.every_steps=100000"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory. A run of this process needs no process that imports libraries, except its gateway."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "ForkServer", OwnForkServer)
    run_here(monkeypatch)
    return tmp_path


StartScript = Callable[..., Command]


@pytest.fixture
def start_script(folder: Path, config: Path, few_processes: list[str]) -> Iterator[StartScript]:
    """Start a script that waits for a long run, and ends when a file named ``end`` appears."""
    commands: list[Command] = []

    def start(resume: bool = False) -> Command:
        (folder / "script.py").write_text(
            "import pathlib, sys, quartet\n"
            f"run = quartet.train({str(config)!r}, {[*few_processes[1::2], *LONG]!r}, wait=False, resume={resume})\n"
            "while not pathlib.Path('end').exists(): run.wait(0.1)\n"
        )
        commands.append(Command(sys.executable, "script.py", cwd=folder))
        return commands[-1]

    yield start
    for command in commands:
        command.clean_up()


def test_a_run_is_trained_read_used_and_resumed_by_a_script_whose_end_ends_it(
    folder: Path,
    config: Path,
    few_processes: list[str],
    start_script: StartScript,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "WAITING_REPORT_SECONDS", 0.0)
    run = quartet.train(config, few_processes[1::2])
    assert (run.name, run.state, run.step, run.total_steps) == ("tiny", "finished", STEPS, STEPS)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed if line.startswith("step ")] == [
        f"{step}/{STEPS}" for step in range(1, STEPS + 1)
    ]
    assert next(line.split(": ")[1] for line in printed if line.startswith("loading for ")) == "actor, critic"

    lines = [json.loads(line) for line in (folder / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal(run.metrics["step"], range(1, STEPS + 1))
    np.testing.assert_array_equal(run.metrics["reward_mean"], [line["reward_mean"] for line in lines])

    trajectories = run.trajectories(2)
    assert len(trajectories) == 8
    assert {item.step for item in trajectories} == {2}
    for item in trajectories:
        assert item.tokens is not None
        assert len(item.tokens.response_ids) == item.response_tokens
        assert item.kl == pytest.approx(float(item.tokens.kl.sum()), abs=1e-4)
    with pytest.raises(ConfigError, match=r"no trajectories of step 9; stored steps: 1 to 8"):
        run.trajectories(9)

    first, second = quartet.generate(run, ["a quick lunch :"], samples=2, max_tokens=5, temperature=0.0)
    assert first.prompt == "a quick lunch :"
    assert first.log_probs.shape == first.token_ids.shape
    assert (first.log_probs <= 0).all()
    assert first.text == second.text
    [checkpoint] = quartet.generate(run.checkpoints[STEPS], first.prompt, max_tokens=5, temperature=0.0)
    np.testing.assert_array_equal(checkpoint.token_ids, first.token_ids)

    run.stop()  # Does nothing, because the run has ended.
    assert quartet.train(config, few_processes[1::2], resume=True, wait=False).state == "finished"
    run.rollback(SAVED[0])
    assert (run.state, run.step) == ("idle", SAVED[0])
    with pytest.raises(ConfigError, match="has no saved policy"):
        run.policy  # noqa: B018
    script = start_script(resume=True)
    script.wait_for(lambda: committed_steps(folder / "runs/tiny") > STEPS)
    assert len(script.processes()) > 2
    (folder / "end").touch()
    result = script.wait()
    assert (result.code, result.leftovers) == (0, []), result
    assert run.state == "idle"
    np.testing.assert_array_equal(run.metrics["reward_mean"][:STEPS], [line["reward_mean"] for line in lines])


@pytest.mark.slow
def test_a_run_that_another_thread_started_is_controlled(
    folder: Path, config: Path, frozen: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[quartet.Run] = []
    settings = [*frozen.serving("reward", "reference")[1::2], *LONG]
    thread = threading.Thread(target=lambda: started.append(quartet.train(config, settings, wait=False)))
    thread.start()
    thread.join()
    [run] = started
    try:
        wait_until(lambda: run.step >= 1)
        assert run.dashboard is not None
        address, _, token = run.dashboard.partition("#token=")
        assert address.startswith("http://127.0.0.1:")
        run.wait(0.1)
        printed = capsys.readouterr().out
        assert f"dashboard: {address} (Run.dashboard is the link with its token)" in printed
        assert token
        assert token not in printed
        [change] = run.set({"actor.learning_rate": 0.002})
        assert (change.before, change.after) == (0.001, 0.002)
        assert run.settings["actor.learning_rate"].value == 0.002
        with pytest.raises(ConfigError, match="kl_coefficient"):
            run.set(kl_coefficient=-1)
        run.pause()
        wait_until(lambda: run.state == "paused")
        other = quartet.Run(run.directory)
        assert other.wait(0.1, progress=False) == "paused"
        run.checkpoint()
        run.resume()
        wait_until(lambda: bool(run.checkpoints))
        [step] = run.checkpoints
        run.rollback(step)
        wait_until(lambda: any("roll" in line for line in lines(run)))
        run.stop()
        assert other.wait(LIMIT, progress=False) == "stopped"
        assert run.wait(LIMIT, progress=False) == "stopped"
        assert run.policy.is_dir()
        with pytest.raises(ConfigError, match="not active"):
            run.pause()
    finally:
        if run._active is not None:
            run._active.interrupt()


def lines(run: quartet.Run) -> list[str]:
    """Return the notes of an active run so far."""
    progress = run._progress()
    return progress.notes if progress is not None else []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties processes to their parent")
def test_a_killed_script_leaves_no_process(start_script: StartScript) -> None:
    script = start_script()
    script.wait_for(lambda: is_loading(script))
    os.kill(script.process.pid, signal.SIGKILL)
    script.process.wait()
    wait_until(lambda: not script.processes(), script.processes)


@pytest.mark.slow
def test_an_interrupt_stops_a_run_that_is_waited_for(folder: Path, config: Path, few_processes: list[str]) -> None:
    (folder / "script.py").write_text(
        f"import quartet\nquartet.train({str(config)!r}, {[*few_processes[1::2], *LONG]!r})\n"
    )
    command = Command(sys.executable, "script.py", cwd=folder)
    try:
        command.wait_for(lambda: committed_steps(folder / "runs/tiny") > 1)
        os.kill(command.process.pid, signal.SIGINT)
        result = command.wait()
    finally:
        command.clean_up()
    assert result.code != 0
    assert result.leftovers == []
    assert "to continue: quartet train runs/tiny/config.yaml --resume" in result.out
    assert result.err.rstrip().endswith("KeyboardInterrupt")


def test_invalid_input_is_refused_before_anything_starts(folder: Path, config: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        quartet.train(config, {"actor.model": "absent/model", "data.prompts": "absent.jsonl"}, wait=False)
    with pytest.raises(ConfigError, match="--overwrite and --resume"):
        quartet.train(config, overwrite=True, resume=True)
    assert not (folder / "runs").exists()
