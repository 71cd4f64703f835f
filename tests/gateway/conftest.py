"""Fixtures of the gateway tests: the toy task, a finished run, and a gateway that serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.contract.control import Alert
from quartet.demo.toy_task import ToyTask
from quartet.run_directory.run_files import RunFiles
from tests.gateway.serving import Gateway, serving
from tests.training.conftest import MakeConfig, _one_thread, make, toy_task, toy_task_tree
from tests.training.runs import Run, run_to_completion

__all__ = ["_one_thread", "make", "toy_task", "toy_task_tree"]

STEPS = 3


@pytest.fixture(scope="session")
def finished_run(make: MakeConfig, toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The only run in its folder: finished, with a critic, evaluations and checkpoints, and with added alerts and failures."""
    folder = tmp_path_factory.mktemp("runs")
    run = run_to_completion(
        make(
            run={"name": "finished", "steps": STEPS, "directory": str(folder)},
            rollout={"samples_per_prompt": 2},
            checkpoint={"every_steps": 2},
            data={"validation": str(toy_task.prompts)},
            evaluation={
                "every_steps": 2,
                "max_prompts": 3,
                "sets": [{"name": "toy", "path": str(toy_task.prompts), "samples_per_prompt": 2, "pass_at": [2]}],
            },
        )
    )
    run.files.append_alert(Alert(1, "kl_runaway", "warn", "kl_mean 30", "lower the learning rate"))
    run.files.append_alert(Alert(2, "repetition", "warn", "0.6", "look at the responses"))
    for sample in (0, 1):
        run.files.append_failed_trajectories(
            {
                "step": 2,
                "id": f"finished/2/0/{sample}",
                "prompt": "p",
                "response": "r",
                "attempts": 3,
                "outcome": "timeout",
                "error": "timeout",
            }
        )
    (run.files.logs / "actor.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    return run


@pytest.fixture(scope="session")
def run_gateway(finished_run: Run) -> Iterator[Gateway]:
    """A gateway that serves the finished run, for tests that only read."""
    with serving(finished_run.files.root.parent) as gateway:
        yield gateway


def write_metrics(files: RunFiles, steps: int, names: int = 3) -> list[dict[str, float]]:
    """Write a ``metrics.jsonl`` with this number of steps."""
    rows = [
        {"step": step, **{f"metric_{n}": float((step * (n + 7)) % 101) for n in range(names)}}
        for step in range(1, steps + 1)
    ]
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
