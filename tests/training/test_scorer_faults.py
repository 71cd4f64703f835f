"""Runs with a scorer over HTTP that fails for some responses: none is trained on, and a killed run ends with the same bits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

import pytest

from quartet.buffer.connection import Redis
from quartet.config.root import Config
from tests.rewards.scorers.http_server import DIALECTS, ScorerServer
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, json_lines, run_to_completion, step_metrics, weights
from tests.training.test_resume import delete_run_data, run_with_crashes

STEPS = 3


def is_failing(text: str) -> bool:
    """Select one response in four, by its checksum."""
    return crc32(text.encode()) % 4 == 0


def config_of(make: MakeConfig, server: ScorerServer, **changes: Any) -> Config:
    http = {"dialect": "slime", "urls": [f"{server.url}/rm"], "backoff_seconds": 0.01}
    return make(
        **{
            "run": {"steps": STEPS},
            "reward": {"source": "http", "model": None, "http": http},
            "critic": {"model": None},
            "checkpoint": {"every_steps": 2},
            "recovery": {"max_failed_trajectories": 16, "backoff_seconds": 0.01},
            **changes,
        }
    )


def failed_rows(run: Run) -> list[dict[str, Any]]:
    """Return the failed trajectories. Their ids are without the name of the run."""
    return [
        {"id": line["id"].partition("/")[2], "outcome": line["outcome"], "attempts": line["attempts"]}
        for line in json_lines(run.files.failed_trajectories)
    ]


@pytest.mark.slow
def test_a_killed_run_has_the_same_failures_and_weights(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    with failing_scorer("nan") as server:
        expected = run_to_completion(config_of(make, server))
        failed = assert_failures(expected, "scorer_error", attempts=3)
        config = config_of(make, server)
        crashes = [("sealed", 2), ("committed", 2)]
        run = run_with_crashes(config, crashes, monkeypatch, lambda: delete_run_data(redis_client, config.run.name))
    assert failed_rows(run) == failed
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)


def test_a_refusal_is_recorded_and_not_attempted_again(make: MakeConfig) -> None:
    with failing_scorer("refusal") as server:
        assert_failures(run_to_completion(config_of(make, server, run={"steps": 2})), "refused", attempts=1)


def failing_scorer(fault: str) -> AbstractContextManager[ScorerServer]:
    return ScorerServer(
        DIALECTS["slime"], fault, score=lambda text: len(text.split()) / 4, is_marked=is_failing
    ).running()


def assert_failures(run: Run, outcome: str, attempts: int) -> list[dict[str, Any]]:
    """Check that all failures of a run have this outcome, and are counted in its metrics. Return them."""
    failed = failed_rows(run)
    assert failed, "the test needs a failed response"
    assert {(row["outcome"], row["attempts"]) for row in failed} == {(outcome, attempts)}
    for step in run.metrics:
        assert step[f"outcome_{outcome}"] == step["failed_trajectories"]
        assert sum(value for name, value in step.items() if name.startswith("outcome_")) == step["failed_trajectories"]
    return failed


def test_a_stray_answer_in_the_middle_of_a_run_changes_nothing_and_is_counted(make: MakeConfig) -> None:
    """tests/rewards/scorers/test_stray_answers.py has the other kinds."""
    runs = []
    for stray in (0, 1):
        server = ScorerServer(
            DIALECTS["slime"],
            "status 404",
            everywhere=True,
            faulty_requests=stray,
            good_requests=5,
            score=lambda text: len(text.split()) / 4,
        )
        with server.running():
            runs.append(run_to_completion(config_of(make, server)))
    expected, run = runs
    assert sum(step["cured_faults"] for step in run.metrics) == 1
    assert sum(step["cured_faults"] for step in expected.metrics) == 0
    assert step_metrics(run) == step_metrics(expected)
    assert weights(run) == weights(expected)


def test_the_scores_of_a_run_are_those_of_the_scorer(make: MakeConfig) -> None:
    with ScorerServer(DIALECTS["slime"], score=lambda text: len(text.split()) / 4).running() as server:
        run = run_to_completion(config_of(make, server))
    rows = [row for path in sorted(run.files.trajectories.glob("*.jsonl")) for row in json_lines(path)]
    assert len(rows) > STEPS
    for row in rows:
        assert row["score"] == len(row["response"].split()) / 4
