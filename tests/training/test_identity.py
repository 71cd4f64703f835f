"""Runs with the same name, Redis, services or directory do not mix their data."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.run_directory.run_files import RunFiles
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, merged, orchestrator, run_to_completion, services
from tests.training.test_resume import crash_run
from tests.waiting import LIMIT

COMMON: dict[str, Any] = {"run": {"steps": 6}, "checkpoint": {"every_steps": 4}, "recovery": {"backoff_seconds": 0.01}}


def changed(config: Config, **changes: Any) -> Config:
    return parse_config(merged(config.model_dump(mode="json"), changes), "test")


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    return run_to_completion(make(**COMMON))


def test_services_trained_by_another_run_of_the_same_name_are_restored(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make(**COMMON)
    with fleet(config) as running_fleet:
        config = running_fleet.config
        crash_run(config, "generate", 4, monkeypatch)
        other = changed(config, run={"directory": str(tmp_path), "seed": 1})
        RunFiles(other.run_directory).write_config(other.to_yaml())
        crash_run(other, "generate", 4, monkeypatch)
        with orchestrator(config) as running:
            run = running.finish()
    assert_same(run, uninterrupted)


def test_an_orchestrator_with_changed_settings_refuses_the_run(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**COMMON)
    crash_run(config, "generate", 3, monkeypatch)
    with services(changed(config, run={"seed": 99})) as addressed, orchestrator(addressed) as running:
        run = running.finish()
    assert run.code == 2
    assert "run.seed is 99" in run.progress.error
    assert len(run.metrics) == 2


def test_changed_prompts_are_refused_and_moved_prompts_are_accepted(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make(**COMMON)
    lines = config.data.prompts.read_text().splitlines(keepends=True)
    fewer, same = tmp_path / "fewer.jsonl", tmp_path / "same.jsonl"
    fewer.write_text("".join(lines[:-5]))
    same.write_text("".join(lines))
    crash_run(config, "generate", 3, monkeypatch)
    with services(changed(config, data={"prompts": str(fewer)})) as addressed, orchestrator(addressed) as running:
        run = running.finish()
    assert run.code == 2
    assert "differs from the file that the run in" in run.progress.error
    assert_same(run_to_completion(changed(config, data={"prompts": str(same)})), uninterrupted)


def test_a_late_commit_of_a_former_leader_is_dropped(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**COMMON)
    stopped, proceed = threading.Event(), threading.Event()
    real = RunFiles.append_metrics

    def append(self: RunFiles, metrics: dict[str, float]) -> None:
        if metrics["step"] == 3 and not stopped.is_set():
            stopped.set()
            assert proceed.wait(LIMIT)
        real(self, metrics)

    monkeypatch.setattr(RunFiles, "append_metrics", append)
    with services(config) as addressed, orchestrator(addressed) as former:
        assert stopped.wait(LIMIT)
        # Simulate an orchestrator that is suspended for longer than its lease.
        redis_client.delete(f"quartet:{config.run.name}:lease")
        with orchestrator(addressed) as leader:
            assert leader.finish().code == 0
        proceed.set()
        # There is no leader now, so the former one acquires the lease and finds all steps done.
        run = former.finish()
    assert run.progress.recoveries == 1
    assert_same(run, uninterrupted)
