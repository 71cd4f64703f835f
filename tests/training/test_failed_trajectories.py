"""Runs with a reward that fails for some responses. These are replaced and recorded, reproducibly."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from quartet.buffer.connection import Redis
from quartet.config.deployment import RecoveryConfig
from quartet.config.root import Config
from quartet.demo.toy_task import ToyTask
from quartet.errors import ComputationFailed, InvalidRequest, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.rpc.clients import RewardClient
from quartet.services.orchestrator.rollout.evaluation import Evaluator
from tests.services.orchestrator.fake_services import FakeCall
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, json_lines, run_to_completion, step_metrics, weights
from tests.training.test_resume import delete_run_data, run_with_crashes

STEPS = 4
FUNCTIONS = '''
from pathlib import Path
from zlib import crc32

def healthy(prompt, response, fields):
    return len(response.split()) / 4

def is_failing(prompt, response):
    """Select one response in four, by its checksum."""
    return crc32((prompt + "|" + response).encode()) % 4 == 0

def raises(prompt, response, fields):
    if is_failing(prompt, response):
        raise ValueError("this response cannot be read")
    return healthy(prompt, response, fields)

def not_a_number(prompt, response, fields):
    return float("nan") if is_failing(prompt, response) else healthy(prompt, response, fields)

def crashes(prompt, response, fields):
    import os
    if is_failing(prompt, response):
        os._exit(3)
    return healthy(prompt, response, fields)

def raises_once(prompt, response, fields):
    seen = Path(f"{crc32((prompt + response).encode())}.seen")
    if is_failing(prompt, response) and not seen.exists():
        seen.touch()
        raise ValueError("the first attempt fails")
    return healthy(prompt, response, fields)

def raises_for_marked(prompt, response, fields):
    if fields.get("marked"):
        raise ValueError("this prompt cannot be scored")
    return healthy(prompt, response, fields)
'''

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "rloo": {"algorithm": {"estimator": "rloo"}, "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2}},
    "one step off-policy": {"rollout": {"max_off_policy_steps": 1}},
}


_FINISHED: dict[str, Run] = {}


@dataclass(frozen=True)
class Runs:
    """Factory of runs that use the functions."""

    make: MakeConfig

    def config(self, function: str, kind: str = "ppo", **changes: Any) -> Config:
        common: dict[str, Any] = {
            "run": {"steps": STEPS},
            "reward": {"source": "function", "function": f"mine:{function}", "model": None, "quote_texts": True},
            "critic": {"model": None},
            "checkpoint": {"every_steps": 2},
        }
        recovery = {"max_failed_trajectories": 6, "backoff_seconds": 0.01, **changes.pop("recovery", {})}
        return self.make(**{**common, **KINDS[kind], **changes, "recovery": recovery})

    def run(self, function: str, kind: str = "ppo", **changes: Any) -> Run:
        return run_to_completion(self.config(function, kind, **changes))

    def expected(self, function: str, kind: str = "ppo", **changes: Any) -> Run:
        """Return a finished run that the tests only read."""
        key = json.dumps([function, kind, changes], default=str)
        if key not in _FINISHED:
            _FINISHED[key] = self.run(function, kind, **changes)
        return _FINISHED[key]

    def failure(self, function: str, kind: str = "ppo", **changes: Any) -> Run:
        with active_run(self.config(function, kind, **changes)) as running:
            run = running.finish()
        assert run.code == 1
        return run


@pytest.fixture
def runs(make: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return Runs(make)


def failed_rows(run: Run) -> list[dict[str, Any]]:
    """Return the failed trajectories without run names and errors, so that runs can be compared."""
    lines = json_lines(run.files.failed_trajectories) if run.files.failed_trajectories.exists() else []
    return [{**line, "id": line["id"].split("/", 1)[1], "error": ""} for line in lines]


def ids(run: Run, step: int) -> list[tuple[int, int]]:
    result = [item["id"].split("/") for item in run.trajectories(step)]
    return [(int(prompt), int(sample)) for _, _, prompt, sample in result]


@pytest.mark.parametrize("kind", ["ppo", "rloo", pytest.param("one step off-policy", marks=pytest.mark.slow)])
def test_a_failed_trajectory_is_replaced_counted_and_reported(kind: str, runs: Runs) -> None:
    run = runs.expected("raises", kind)
    samples = KINDS[kind].get("rollout", {}).get("samples_per_prompt", 1)
    lines = json_lines(run.files.failed_trajectories)
    assert len(lines) >= 2, "the test needs a failed trajectory"
    for step, metrics in enumerate(run.metrics, 1):
        failed = [line for line in lines if line["step"] == step]
        assert metrics["failed_trajectories"] == len(failed)
        names = [tuple(map(int, line["id"].split("/")[2:])) for line in failed]
        trained = ids(run, step)
        assert not set(names) & set(trained)
        for prompt in {prompt for prompt, _ in trained}:
            # The number of samples is unchanged, and each failed sample is replaced by the next one.
            all_samples = sorted(sample for result, sample in [*names, *trained] if result == prompt)
            assert len([result for result, _ in trained if result == prompt]) == samples
            assert all_samples == list(range(len(all_samples)))
        notes = [note for note in run.progress.notes if note.startswith(f"step {step}: ")]
        assert len(notes) == bool(failed)
        assert all("failed_trajectories.jsonl" in note for note in notes)
        # The config sets reward.quote_texts.
        assert all("mine:raises raised ValueError at mine.py:" in note for note in notes)
        assert all("this response cannot be read" in note for note in notes)
    for line in lines:
        assert line["attempts"] == 3
        first, newest = int(line["id"].split("/")[3]) < samples, line["step"] - 1
        off_policy_steps = run.metrics[newest].get("off_policy_steps", 0)
        # Replacements are generated by the newest policy, even if the run is off-policy.
        assert line["policy_version"] == newest - (off_policy_steps if first else 0)
        assert "mine:raises" in line["error"]
        assert "raised ValueError at mine.py:" in line["error"]
        assert line["error"].endswith(": this response cannot be read")
        assert line["prompt"]
        assert line["prompt_ids"]
        assert line["response_ids"]


@pytest.mark.parametrize(
    ("function", "error", "steps"),
    [("not_a_number", "nan", STEPS), pytest.param("crashes", "ended with status 3", 2, marks=pytest.mark.slow)],
)
def test_every_kind_of_scoring_failure_is_handled_in_the_same_way(
    function: str, error: str, steps: int, runs: Runs
) -> None:
    expected, run = runs.expected("raises"), runs.run(function, run={"steps": steps})
    assert all(error in line["error"] for line in json_lines(run.files.failed_trajectories))
    assert failed_rows(run) == [row for row in failed_rows(expected) if row["step"] <= steps] != []
    assert step_metrics(run) == step_metrics(expected)[:steps]
    if steps == STEPS:
        assert weights(run) == weights(expected)


def test_a_transient_scoring_failure_changes_nothing(runs: Runs) -> None:
    expected, run = runs.expected("healthy"), runs.run("raises_once")
    assert list(Path().glob("*.seen")), "the test needs a failed attempt"
    assert not run.files.failed_trajectories.exists()
    assert {step["failed_trajectories"] for step in run.metrics} == {0}
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)


@pytest.mark.slow
def test_a_run_that_crashes_at_every_point_records_each_failed_trajectory_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    kind = "rloo"
    config = runs.config("raises", kind)
    crashes = [("sealed", 3), ("updated", 3), ("committed", 3), ("updated", 4)]
    lose = partial(delete_run_data, redis_client, config.run.name)
    run, expected = run_with_crashes(config, crashes, monkeypatch, lose), runs.expected("raises", kind)
    assert any(line["step"] >= 3 for line in failed_rows(expected)), "the test needs a failed trajectory"
    assert failed_rows(run) == failed_rows(expected)
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)
    assert [ids(run, step) for step in range(1, STEPS + 1)] == [ids(expected, step) for step in range(1, STEPS + 1)]


def marked(toy_task: ToyTask, path: Path, count: int) -> dict[str, Any]:
    """Write the prompts of the toy task, ``count`` of them marked; return the data section."""
    lines = [json.loads(line) for line in toy_task.prompts.read_text().splitlines()]
    with path.open("w") as file:
        for number, line in enumerate(lines):
            file.write(json.dumps({**line, "marked": number < count}) + "\n")
    return {"prompts": str(path)}


def test_a_source_that_always_fails_ends_the_run_with_prompts_and_error(
    runs: Runs, toy_task: ToyTask, tmp_path: Path
) -> None:
    data = marked(toy_task, tmp_path / "prompts.jsonl", len(toy_task.prompts.read_text().splitlines()))
    run = runs.failure("raises_for_marked", data=data, recovery={"max_failed_trajectories": 2})
    text = run.progress.error
    cause, step, prompts = text.split("\n")
    assert cause.startswith("reward.function mine:raises_for_marked raised ValueError at mine.py:")
    assert cause.endswith(": this prompt cannot be scored")
    assert step.startswith(
        "step 1: 3 of its prompts have no response with a score (failed responses: scorer_error 3); "
    )
    assert "recovery.max_failed_trajectories 2;" in step
    assert not run.files.metrics.exists(), "the failed step has metrics"
    lines = json_lines(run.files.failed_trajectories)
    assert [line["step"] for line in lines] == [1, 1, 1]
    assert all(line["response_ids"] and "mine:raises_for_marked" in line["error"] for line in lines)
    assert prompts.endswith(": " + ", ".join(line["id"].split("/")[2] for line in lines))
    assert run.progress.recoveries == 0, "a permanent failure was retried"


def test_a_resumed_run_drops_the_failure_that_ended_it(runs: Runs, toy_task: ToyTask, tmp_path: Path) -> None:
    data = marked(toy_task, tmp_path / "prompts.jsonl", len(toy_task.prompts.read_text().splitlines()))
    changes: dict[str, Any] = {"data": data, "run": {"steps": 1, "name": "repaired"}}
    broken = runs.failure("raises_for_marked", **changes)
    assert broken.files.failed_trajectories.exists()
    repaired = runs.run("healthy", **changes)
    assert repaired.files.failed_trajectories == broken.files.failed_trajectories
    assert failed_rows(repaired) == []


def test_no_failed_trajectory_is_allowed_with_a_limit_of_0(runs: Runs) -> None:
    expected = runs.expected("raises")
    first = failed_rows(expected)[0]
    run = runs.failure("raises", recovery={"max_failed_trajectories": 0})
    assert len(run.metrics) == first["step"] - 1 if first["step"] > 1 else not run.files.metrics.exists()
    assert f"step {first['step']}: 1 of its prompts have no response with a score" in run.progress.error
    assert run.progress.error.endswith(f": {first['id'].split('/')[1]}")


def test_a_failed_baseline_evaluation_ends_the_run(runs: Runs, toy_task: ToyTask, tmp_path: Path) -> None:
    validation = marked(toy_task, tmp_path / "validation.jsonl", 1)["prompts"]
    data = {"validation": validation}
    run = runs.failure(
        "raises_for_marked", data=data, evaluation={"every_steps": 1, "max_prompts": 3}, recovery={"max_recoveries": 0}
    )
    assert run.progress.error.startswith("reward.function mine:raises_for_marked raised ValueError at mine.py:")
    assert not run.files.metrics.exists()


EVALUATION: dict[str, Any] = {"every_steps": 1, "max_prompts": 3}


def test_a_failed_later_evaluation_becomes_a_note_and_the_run_continues(
    runs: Runs, toy_task: ToyTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost service is waited for instead, and the evaluation is repeated."""
    changes: dict[str, Any] = {"data": {"validation": str(toy_task.prompts)}, "evaluation": EVALUATION}
    expected = runs.expected("healthy", **changes)
    message = "reward: raised ValueError: my secret"
    failures: dict[int, QuartetError] = {2: ComputationFailed(message), 3: InvalidRequest(message)}
    lost, real = [ServiceUnavailable("reward: gone")], Evaluator._responses

    def fail(self: Evaluator, request: Any, *arguments: Any) -> Any:
        version = request.policy_version
        if version == 1 and lost:
            raise lost.pop()
        if version in failures:
            raise failures[version]
        return real(self, request, *arguments)

    monkeypatch.setattr(Evaluator, "_responses", fail)
    with structlog.testing.capture_logs() as logged:
        run = runs.run("healthy", **changes)
    summaries, others = json_lines(run.files.evaluation_summaries), json_lines(expected.files.evaluation_summaries)
    assert [line["step"] for line in others] == [0, 1, 2, 3, 4]
    assert summaries == [line for line in others if line["step"] not in failures], "other evaluations have changed"
    assert weights(run) == weights(expected)
    lines = json_lines(run.files.failed_trajectories)
    assert [line["step"] for line in lines] == [*failures]
    for (step, error), line in zip(failures.items(), lines, strict=True):
        assert not (run.files.evaluations / f"step-{step:06d}.jsonl").exists()
        [note] = [note for note in run.progress.notes if note.startswith(f"evaluation after step {step} failed")]
        assert type(error).__name__ in note
        assert line["error"] == message
    assert "secret" not in str(run.progress.notes) + str(logged)
    assert run.progress.recoveries == 1
    assert {step["failed_trajectories"] for step in run.metrics} == {0}


class TransientFailure:
    """A reward client that fails for some seconds, from its third call."""

    def __init__(self, seconds: float, error: QuartetError) -> None:
        self._seconds, self._error = seconds, error
        self._real = RewardClient.score
        self._failure_start: float | None = None
        self.calls = 0

    def __call__(self, client: RewardClient, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            self._failure_start = time.monotonic()
        call = self._real(client, *arguments)
        if self._failure_start is None or time.monotonic() - self._failure_start >= self._seconds:
            return call
        failed = FakeCall()
        failed.complete(self._error)
        return failed


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        (0.3, ServiceFailed("HTTP 503")),
        pytest.param(0.3, ComputationFailed("overloaded"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_scoring_service_with_a_transient_failure_fails_no_trajectory(
    seconds: float, error: QuartetError, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "rollout": {"prompts_per_step": 8, "score_batch_size": 4},
        "recovery": RecoveryConfig().model_dump(),
    }
    expected = runs.expected("healthy", **changes)
    transient = TransientFailure(seconds, error)
    monkeypatch.setattr(RewardClient, "score", lambda *arguments: transient(*arguments))
    run = runs.run("healthy", **changes)
    assert transient.calls > 2 * STEPS, "the test needs retries"
    assert not run.files.failed_trajectories.exists()
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)


def test_a_scoring_service_that_keeps_failing_ends_the_run_with_its_error(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*_: Any) -> Any:
        failed = FakeCall()
        failed.complete(ServiceFailed("reward: HTTP 503"))
        return failed

    monkeypatch.setattr(RewardClient, "score", score)
    run = runs.failure("healthy", recovery={"max_recoveries": 2})
    assert run.progress.error.startswith("gave up after 2 recoveries in a row")
    assert "reward: HTTP 503" in run.progress.error
    assert not run.files.failed_trajectories.exists()
