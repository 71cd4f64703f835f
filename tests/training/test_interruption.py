"""A run whose process ends in the middle of a step has no outcome. The next process continues it bit-identically."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import connect
from quartet.config.root import Config
from quartet.contract.control import RunState
from quartet.errors import ConfigError, ServiceFailed
from quartet.run_directory.run_files import RunFiles, RunOutcome
from quartet.services.orchestrator.telemetry.run_outputs import RunTelemetry
from quartet.services.orchestrator.training_run import TrainingRun
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import active_run_with_generators
from tests.training.runs import (
    ActiveRun,
    Run,
    active_run,
    assert_same,
    orchestrator,
    run_to_completion,
    services,
    wait_for,
)
from tests.waiting import LIMIT

STEPS = 6
SHORT: dict[str, Any] = {"run": {"steps": STEPS}, "checkpoint": {"every_steps": 3}}
SLOW_JUDGE = """
import pathlib, time

def judge(prompt, response, initial_response, fields):
    pathlib.Path("judging").touch()
    time.sleep(60)
    return 0.0
"""


@contextmanager
def services_and_training(config: Config, generators: int) -> Iterator[ActiveRun]:
    if generators:
        with active_run_with_generators(config, generators) as (active, _):
            yield active
    else:
        with active_run(config) as active:
            yield active


def interrupt(active: ActiveRun) -> None:
    """Interrupt a run as its process does at SIGTERM. It must have no outcome and no lease."""
    active.interrupt()
    active.thread.join(LIMIT)
    assert not active.thread.is_alive()
    assert active.exit_codes == []
    assert RunFiles(active.config.run_directory).read_outcome() is None
    progress = active.board.current()
    assert (progress.state, progress.recoveries, progress.error) == (RunState.TRAINING, 0, "")
    assert active.config.buffer.url is not None
    assert connect(active.config.buffer.url).get(f"quartet:{active.config.run.name}:lease") is None


@pytest.fixture(scope="module")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


@pytest.mark.parametrize("generators", [0, 2])
def test_an_interrupted_run_has_no_outcome_and_the_next_process_continues_it(
    generators: int, make: MakeConfig, undisturbed: Run
) -> None:
    with services_and_training(make(**SHORT), generators) as active:
        wait_for(active, lambda: active.board.current().step >= 2)
        interrupt(active)
        assert active.board.current().step < STEPS
        with orchestrator(active.config) as continued:
            run = continued.finish()
    assert_same(run, undisturbed)


def test_an_interrupted_evaluation_is_no_end_of_the_run(
    make: MakeConfig, toy_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_judge.py").write_text(SLOW_JUDGE)
    monkeypatch.chdir(tmp_path)
    evaluation = {"every_steps": 2, "max_prompts": 2, "judge": "slow_judge:judge"}
    config = make(**SHORT, data={"validation": str(toy_task.prompts)}, evaluation=evaluation)
    with active_run(config) as active:
        wait_for(active, (tmp_path / "judging").exists)
        interrupt(active)


@pytest.mark.parametrize(("error", "code"), [(None, 0), (ConfigError("wrong"), 2), (ServiceFailed("lost"), 1)])
def test_an_interruption_after_the_end_of_a_run_does_not_change_its_outcome(
    error: Exception | None, code: int, make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, interrupted = threading.Event(), threading.Event()

    def run_to_end(self: TrainingRun) -> RunOutcome:
        if error is not None:
            raise error
        return RunOutcome(RunState.FINISHED, 0)

    def close(self: RunTelemetry) -> None:
        if closing.is_set():
            interrupted.set()  # The interruption closes the run for the second time.
        closing.set()
        assert interrupted.wait(LIMIT)

    monkeypatch.setattr(TrainingRun, "_run_to_end", run_to_end)
    monkeypatch.setattr(RunTelemetry, "close", close)
    with services(make(**SHORT)) as addressed, orchestrator(addressed) as active:
        assert closing.wait(LIMIT)
        active.interrupt()
        active.thread.join(LIMIT)
    assert active.exit_codes == [code]
    recorded = RunFiles(active.config.run_directory).read_outcome()
    assert recorded == (RunOutcome(RunState.FINISHED, 0) if error is None else RunOutcome.of(error, 0))
