"""Overlap of steps: the next generation starts as soon as the policy is updated, except before a checkpoint or evaluation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quartet.demo.toy_task import ToyTask
from quartet.run_directory.run_files import RunFiles
from quartet.services.actor import actor
from quartet.services.critic import critic
from quartet.services.orchestrator.checkpointing import step_artifacts as records
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, json_lines, run_to_completion, step_metrics
from tests.waiting import LIMIT

STEPS = 3
TIMEOUT = LIMIT
"""Seconds to wait at the barrier."""


def early_generations(files: RunFiles) -> list[int]:
    """Return, per step, the number of generations that start between the end of the policy update and the commit."""
    result = []
    for line in json_lines(files.timeline):
        spans = {(span["service"], span["phase"]): span for span in line["spans"]}
        start, end = spans["actor", "update"]["end"], spans["orchestrator", "commit"]["start"]
        starts = [span["start"] for span in line["spans"] if span["phase"] == "generate"]
        assert max(starts, default=0.0) <= end
        result.append(sum(start <= start_time for start_time in starts))
    return result


@pytest.fixture(scope="module")
def run(make: MakeConfig) -> Run:
    return run_to_completion(make(run={"steps": STEPS}, checkpoint={"every_steps": 0}))


def test_the_next_generation_starts_before_the_step_is_committed(run: Run) -> None:
    assert early_generations(run.files) == [1, 1, 0]


def test_step_artifacts_are_computed_during_the_update(
    make: MakeConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = threading.Barrier(3)

    def with_barrier(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            barrier.wait(TIMEOUT)
            return work(*arguments)

        return wrapped

    for module, name in ((actor, "update_policy"), (critic, "update_value"), (records, "trajectory_rows")):
        monkeypatch.setattr(module, name, with_barrier(getattr(module, name)))
    assert step_metrics(run_to_completion(make(run={"steps": STEPS}, checkpoint={"every_steps": 0}))) == step_metrics(
        run
    )


@pytest.mark.parametrize("between", ["checkpoint", "evaluation"])
def test_evaluations_and_checkpoints_run_before_the_next_generation(
    between: str, make: MakeConfig, toy_task: ToyTask, run: Run
) -> None:
    changes: dict[str, Any] = {
        "checkpoint": {"checkpoint": {"every_steps": 1}},
        "evaluation": {
            "evaluation": {"every_steps": 1, "max_prompts": 2},
            "data": {"validation": str(toy_task.prompts)},
            "checkpoint": {"every_steps": 0},
        },
    }[between]
    other = run_to_completion(make(run={"steps": STEPS}, **changes))
    assert early_generations(other.files) == [0, 0, 0]
    assert step_metrics(other) == step_metrics(run)


def test_a_guard_stop_cancels_the_next_generation(make: MakeConfig) -> None:
    guards = {"window_steps": 2, "critic_lost": {"below": 1.0, "action": "stop"}}
    with active_run(make(run={"steps": 30}, checkpoint={"every_steps": 0}, guards=guards)) as running:
        stopped = running.finish()
    steps = len(stopped.metrics)
    assert stopped.code == 1
    assert steps < 30
    assert early_generations(stopped.files) == [1] * steps, "no generation was started and then cancelled"
    assert (stopped.files.policy / "model.safetensors").exists()
