"""Training with several turns: records, numerics of a whole run, and the same bits after faults."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from quartet.buffer.connection import Redis
from quartet.buffer.turn_records import TurnRecords, TurnRecordStore
from quartet.contract.status import Role
from quartet.contract.trajectory import EnvironmentReply, TrajectoryId
from quartet.contract.turn_record import RecordedTurn
from quartet.demo.toy_task import ToyTask
from quartet.run_directory.run_files import RunFiles
from quartet.services import roles
from quartet.services.generator import factory as generator_factory
from quartet.services.generator.episodes import EnvironmentAccess
from tests.services.generator.environments import EchoEnvironment, failure
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, json_lines, run_to_completion
from tests.training.test_recovery import run_with_lost_services

STEPS = 4
EPISODES: dict[str, Any] = {
    "run": {"steps": STEPS},
    "rollout": {"max_turns": 3, "max_turn_tokens": 6, "max_response_tokens": 24},
    "environment": {"class_name": "quartet.environments.examples:WordPuzzle"},
    "checkpoint": {"every_steps": 2},
    "telemetry": {"tokens_every_steps": 1},
    "recovery": {"backoff_seconds": 0.01},
}


@contextmanager
def environment(recorded: bool = True, **options: Any) -> Iterator[EchoEnvironment]:
    """Give an environment to the actors and generators that are created inside the context. ``recorded``: with turn records."""
    echo = EchoEnvironment(**options)
    with pytest.MonkeyPatch.context() as patch:
        for module in (roles, generator_factory):
            patch.setattr(
                module,
                "environment_access",
                lambda config, credentials, records: EnvironmentAccess(
                    echo,
                    6,
                    config.recovery.max_attempts,
                    (lambda batch: records(batch.run).records_of(batch)) if recorded else None,
                ),
            )
        yield echo


def slow(session: str, turn: int) -> None:
    time.sleep(zlib.crc32(f"{session} {turn}".encode()) % 5 / 1000)


@pytest.fixture(scope="module")
def finished(make: MakeConfig) -> Run:
    with environment() as echo:
        run = run_to_completion(make(**EPISODES))
    assert not echo.sessions
    return run


def test_a_run_with_several_turns_records_them(finished: Run) -> None:
    for step, metrics in enumerate(finished.metrics, 1):
        rows = finished.trajectories(step)
        segments = [segment for row in rows for segment in row["segments"]]
        own = [segment for segment in segments if segment["role"] == "policy"]
        assert (
            metrics["response_tokens"] == sum(row["response_tokens"] for row in rows) == sum(s["tokens"] for s in own)
        )
        assert metrics["observation_tokens"] == sum(s["tokens"] for s in segments if s["role"] == "observation") > 0
        assert metrics["turns_mean"] == len(own) / len(rows) > 1
        for index, row in enumerate(rows):
            rewards = [segment["reward"] for segment in row["segments"] if segment["role"] == "policy"]
            assert row["parts"]["environment"] == pytest.approx(sum(rewards))
            tokens = finished.files.read_tokens(step, index)
            assert tokens is not None
            assert int(tokens.response_mask.sum()) == row["response_tokens"] <= 24
            assert len(tokens.response_ids) <= 24
            outside = ~tokens.response_mask
            for name in ("log_probs", "reference_log_probs", "kl", "advantages", "returns", "values"):
                assert not np.any(getattr(tokens, name)[outside]), name
            assert row["kl"] == pytest.approx(float(tokens.kl.sum()), abs=1e-4)


def test_a_run_that_loses_the_actor_is_bit_identical(
    make: MakeConfig, finished: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers take different times, too."""
    losses = {(3, "generate"): Role.ACTOR, (4, "update"): Role.ACTOR}
    with environment(wait=slow):
        assert_same(run_with_lost_services(make(**EPISODES), losses, monkeypatch), finished)


def test_recording_changes_no_bit(make: MakeConfig, finished: Run) -> None:
    with environment(recorded=False):
        assert_same(run_to_completion(make(**EPISODES)), finished)


def test_a_finished_run_leaves_no_turn_records(
    make: MakeConfig, toy_task: ToyTask, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended: list[TrajectoryId] = []
    append = TurnRecords.append

    def counted(self: TurnRecords, id: TrajectoryId, turn: RecordedTurn) -> bool:
        appended.append(id)
        return append(self, id, turn)

    monkeypatch.setattr(TurnRecords, "append", counted)
    config = make(
        **EPISODES, data={"validation": str(toy_task.prompts)}, evaluation={"every_steps": 2, "max_prompts": 3}
    )
    with environment():
        run_to_completion(config)
    assert {id.step for id in appended} == set(range(STEPS + 1))
    assert not list(redis_client.scan_iter(f"quartet:{config.run.name}*:turns:*"))


def test_a_run_without_an_environment_records_nothing(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Any:
        raise AssertionError("a turn record of a run without turns")

    for name in ("records_of", "forget_step", "forget_before", "forget_all"):
        monkeypatch.setattr(TurnRecordStore, name, refuse)
    assert run_to_completion(make(run={"steps": 2})).code == 0


def test_an_environment_that_fails_once_changes_no_bit(make: MakeConfig, finished: Run) -> None:
    failed = set[str]()

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        trajectory = session.rpartition("/")[0]
        # Without the name of the run, which differs from test to test.
        if turn != 1 or zlib.crc32(trajectory.partition("/")[2].encode()) % 3 or trajectory in failed:
            return None
        failed.add(trajectory)
        return failure()

    with environment(fail=fail):
        assert_same(run_to_completion(make(**EPISODES)), finished)
    assert failed


def test_evaluations_play_episodes(make: MakeConfig, toy_task: ToyTask) -> None:
    data = {"validation": str(toy_task.prompts)}
    config = make(**EPISODES, data=data, evaluation={"every_steps": STEPS, "max_prompts": 3})
    with environment() as echo:
        run = run_to_completion(config)
    assert any("evaluation" in call.session for call in echo.calls)
    assert (RunFiles(config.run_directory).evaluation_summaries).exists()
    assert run.code == 0


def test_every_sample_of_an_evaluation_set_counts_although_steps_keep_fewer(
    make: MakeConfig, toy_task: ToyTask
) -> None:
    sets = [{"name": "toy", "path": str(toy_task.prompts), "samples_per_prompt": 5, "max_prompts": 2, "pass_at": [5]}]
    rollout = {**EPISODES["rollout"], "samples_per_prompt": 2, "extra_samples": 1}
    changes = {**EPISODES, "rollout": rollout, "run": {"steps": 1}}
    config = make(**changes, evaluation={"every_steps": 1, "sets": sets})
    with environment():
        run_to_completion(config)
    rows = json_lines(RunFiles(config.run_directory).evaluation_of(1, "toy"))
    assert [len(row["samples"]) for row in rows] == [5, 5]


def test_a_failed_episode_of_an_evaluation_does_not_stop_training(make: MakeConfig, toy_task: ToyTask) -> None:
    data = {"validation": str(toy_task.prompts)}
    config = make(**EPISODES, data=data, evaluation={"every_steps": 1, "max_prompts": 3})
    evaluated = set[str]()

    def fail(session: str, turn: int) -> EnvironmentReply | None:
        """Fail from the second evaluation on: the first is the baseline."""
        if "evaluation" not in session or turn:
            return None
        evaluated.add(session)
        return failure() if len(evaluated) > 6 else None

    with environment(fail=fail):
        run = run_to_completion(config)
    assert run.code == 0
    assert len(run.metrics) == STEPS
    rows = json_lines(run.files.failed_trajectories)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all("environment_error" in row["error"] for row in rows)
