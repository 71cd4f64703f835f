"""Runs with prompts whose responses can never be scored: they are skipped, reproducibly after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.config.root import Config
from quartet.demo.toy_task import ToyTask
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, json_lines, run_to_completion
from tests.training.test_resume import delete_run_data, run_with_crashes

STEPS, EVERY = 4, 9
FUNCTIONS = """
import time

def declines(completions, answer, **columns):
    return [None if wanted == "rain" else len(text) / 8 for text, wanted in zip(completions, answer)]

def hangs(prompt, response, fields):
    if fields["answer"] == "rain":
        time.sleep(600)
    return len(response) / 8
"""
GROUPS = {"prompts_per_step": 4, "samples_per_prompt": 3}
KINDS: dict[str, dict[str, Any]] = {
    "groups": {"algorithm": {"estimator": "grpo"}, "rollout": GROUPS},
    "dynamic": {"algorithm": {"estimator": "grpo"}, "rollout": {**GROUPS, "dynamic_sampling": True}},
    "off-policy": {"algorithm": {"estimator": "grpo"}, "rollout": {**GROUPS, "max_off_policy_steps": 1}},
    "greedy": {"algorithm": {"estimator": "remax"}},
}


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def prompts(toy_task: ToyTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts of the toy task. One in ``EVERY`` has an answer that cannot be compared."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [json.loads(line) for line in toy_task.prompts.read_text().splitlines()]
    rows = [{**line, "answer": "4" if number % EVERY else "rain"} for number, line in enumerate(lines)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(make: MakeConfig, prompts: Path, kind: str, function: str = "declines", **changes: Any) -> Config:
    signature = "trl" if function == "declines" else "quartet"
    reward = {"source": "function", "function": f"mine:{function}", "signature": signature, "model": None}
    common: dict[str, Any] = {
        "run": {"steps": STEPS},
        "data": {"prompts": str(prompts)},
        "reward": {**reward, "timeout_seconds": 0.3},
        "critic": {"model": None},
        "checkpoint": {"every_steps": 2},
        "rollout": {"prompts_per_step": 8},
    }
    recovery = {
        "backoff_seconds": 0.01,
        "max_scoring_attempts": 2,
        "max_skipped_prompt_fraction": 0.5,
        **changes.pop("recovery", {}),
    }
    return make(**{**common, **KINDS[kind], **changes, "recovery": recovery})


def prompts_of(run: Run, step: int) -> list[int]:
    return sorted({int(row["id"].split("/")[2]) for row in run.trajectories(step)})


def assert_skipped(run: Run, config: Config, kind: str) -> None:
    """Check that the steps of a run have their prompts, and that it has recorded those that it has skipped."""
    assert sum(step["skipped_prompts"] for step in run.metrics) > 1, "the test needs skipped prompts"
    for step, metrics in enumerate(run.metrics, 1):
        rows = [row for row in json_lines(run.files.failed_trajectories) if row["step"] == step]
        skipped = {int(row["id"].split("/")[2]) for row in rows if row["prompt_skipped"]}
        assert len(skipped) == metrics["skipped_prompts"]
        assert all(number % EVERY == 0 for number in skipped)
        assert len(rows) == metrics["outcome_refused"] == len(skipped) * (3 + (kind == "greedy"))
        assert len(prompts_of(run, step)) == config.rollout.prompts_per_step
        assert not [number for number in prompts_of(run, step) if number % EVERY == 0]


def test_the_next_prompts_take_the_place_of_skipped_ones(make: MakeConfig, prompts: Path) -> None:
    settings = config(make, prompts, "groups")
    run = run_to_completion(settings)
    assert_skipped(run, settings, "groups")
    consumed = sum(step.get("prompts_consumed", settings.rollout.prompts_per_step) for step in run.metrics)
    used = [prompt for step in range(1, STEPS + 1) for prompt in prompts_of(run, step)]
    assert len(set(used)) == len(used), "a prompt was used twice"
    assert consumed == len(used) + sum(step["skipped_prompts"] for step in run.metrics)


@pytest.mark.parametrize(
    ("kind", "lost"), [("dynamic", True), ("off-policy", False), pytest.param("greedy", True, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_a_run_that_crashes_at_every_point_skips_the_same_prompts(
    kind: str, lost: bool, make: MakeConfig, prompts: Path, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    """After the data in Redis is lost, steps are recomputed."""
    expected, crashed = run_to_completion(config(make, prompts, kind)), config(make, prompts, kind)
    assert_skipped(expected, crashed, kind)
    crashes = [("sealed", 3), *([] if lost else [("committed", 3)])]
    lose = (lambda: delete_run_data(redis_client, crashed.run.name)) if lost else lambda: None
    assert_same(run_with_crashes(crashed, crashes, monkeypatch, lose), expected)


def test_a_prompt_whose_scorer_always_hangs_is_skipped(make: MakeConfig, prompts: Path) -> None:
    run = run_to_completion(config(make, prompts, "groups", "hangs", run={"steps": 1}))
    skipped = sum(step["skipped_prompts"] for step in run.metrics)
    assert skipped
    assert sum(step["outcome_timeout"] for step in run.metrics) == 3 * skipped
    assert any("responses to the next prompts (skipped, by line from 0: " in note for note in run.progress.notes)


def test_the_fraction_of_skipped_prompts_is_limited_over_the_run(make: MakeConfig, prompts: Path) -> None:
    limits = {"max_failed_trajectories": 2, "max_skipped_prompt_fraction": 0.01}
    with active_run(config(make, prompts, "groups", run={"steps": 40}, recovery=limits)) as running:
        run = running.finish()
    assert run.code == 1
    assert "recovery.max_skipped_prompt_fraction 0.01" in run.progress.error
    assert "refused" in run.progress.error
    assert sum(step["skipped_prompts"] for step in run.metrics) == 2
