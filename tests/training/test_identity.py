"""Runs that share a name, a Redis, services or a directory do not mix up their work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from quartet.buffer.connection import Redis
from quartet.config import Config, parse_config
from quartet.run_directory.run_files import RunFiles
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, fleet, merged, orchestrator, run_to_the_end, services
from tests.training.test_resume import break_off

COMMON: dict[str, Any] = {"run": {"steps": 6}, "checkpoint": {"every_steps": 4}, "recovery": {"backoff_seconds": 0.01}}


def changed(config: Config, **changes: Any) -> Config:
    return parse_config(merged(config.model_dump(mode="json"), changes), "test")


@pytest.fixture(scope="module")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_the_end(make(**COMMON))


def test_another_run_of_the_same_name_in_redis_is_not_mistaken_for_this_one(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = make(**COMMON)
    other = changed(ours, run={"directory": str(tmp_path), "seed": 1})
    break_off(ours, "generate", 4, monkeypatch)
    break_off(other, "generate", 4, monkeypatch)
    assert_same(run_to_the_end(ours), undisturbed)


def test_services_trained_by_another_run_of_the_same_name_are_restored(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make(**COMMON)
    with fleet(config) as started:
        ours = started.config
        break_off(ours, "generate", 4, monkeypatch)
        other = changed(ours, run={"directory": str(tmp_path), "seed": 1})
        RunFiles(other.run_directory).write_config(other.to_yaml())
        break_off(other, "generate", 4, monkeypatch)
        with orchestrator(ours) as running:
            run = running.finish()
    assert_same(run, undisturbed)


@pytest.mark.parametrize(
    "change",
    [
        {"run": {"seed": 99}},
        {"algorithm": {"kl_coefficient": 0.9}},
        {"actor": {"learning_rate": 0.1}},
        {"rollout": {"temperature": 0.5}},
    ],
)
def test_an_orchestrator_with_changed_settings_refuses_the_run(
    change: dict[str, Any], make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**COMMON)
    break_off(config, "generate", 3, monkeypatch)
    [(section, [(name, value)])] = [(section, list(values.items())) for section, values in change.items()]
    with services(changed(config, **change)) as addressed, orchestrator(addressed) as running:
        run = running.finish()
    assert run.code == 2
    assert f"{section}.{name} is {value}" in run.progress.error
    assert len(run.metrics) == 2


def test_a_run_without_its_identity_is_refused(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**COMMON)
    break_off(config, "generate", 3, monkeypatch)
    RunFiles(config.run_directory).identity.unlink()
    with services(config) as addressed, orchestrator(addressed) as running:
        run = running.finish()
    assert run.code == 2
    assert "run.json: is missing; put the file back, or start a new run" in run.progress.error


def test_changed_prompts_are_refused_and_moved_prompts_are_accepted(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = make(**COMMON)
    lines = config.data.prompts.read_text().splitlines(keepends=True)
    fewer, same = tmp_path / "fewer.jsonl", tmp_path / "same.jsonl"
    fewer.write_text("".join(lines[:-5]))
    same.write_text("".join(lines))
    break_off(config, "generate", 3, monkeypatch)
    with services(changed(config, data={"prompts": str(fewer)})) as addressed, orchestrator(addressed) as running:
        run = running.finish()
    assert run.code == 2
    assert "differs from the file that the run in" in run.progress.error
    assert_same(run_to_the_end(changed(config, data={"prompts": str(same)})), undisturbed)


def test_a_late_commit_of_a_former_leader_is_dropped(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch, redis_client: Redis
) -> None:
    config = make(**COMMON)
    stopped, go = threading.Event(), threading.Event()
    real = RunFiles.append_metrics

    def append(self: RunFiles, metrics: dict[str, float]) -> None:
        if metrics["step"] == 3 and not stopped.is_set():
            stopped.set()
            assert go.wait(60)
        real(self, metrics)

    monkeypatch.setattr(RunFiles, "append_metrics", append)
    with services(config) as addressed, orchestrator(addressed) as former:
        assert stopped.wait(60)
        # As if it had been stopped for longer than its lease lasts.
        redis_client.delete(f"quartet:{config.run.name}:lease")
        with orchestrator(addressed) as leader:
            assert leader.finish().code == 0
        go.set()
        # No leader is left, so the former one acquires the lease, and all steps are done.
        run = former.finish()
    assert run.progress.recoveries == 1
    assert_same(run, undisturbed)
