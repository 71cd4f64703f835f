"""The moving average of the policy in whole runs: saved at the end, and bit-identical after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.buffer.connection import Redis
from quartet.cli.checkpoint.export import export
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, assert_same, run_to_completion
from tests.training.test_resume import crash_run, delete_run_data

CHANGES = {
    "run": {"steps": 3},
    "actor": {"ema_decay": 0.5, "learning_rate": 1e-2},
    "checkpoint": {"every_steps": 2, "keep_last": 1},
}


def average(run: Run) -> bytes:
    return (run.files.policy_ema / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    run = run_to_completion(make(**CHANGES))
    assert run.code == 0, run.progress.error
    return run


@pytest.mark.parametrize(("crash_point", "buffer_lost"), [("updated", False), ("committed", True)])
def test_the_average_of_a_crashed_run_is_bit_identical(
    crash_point: str,
    buffer_lost: bool,
    make: MakeConfig,
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    config = make(**CHANGES)
    crash_run(config, crash_point, 3, monkeypatch)
    if buffer_lost:
        delete_run_data(redis_client, config.run.name)
    run = run_to_completion(config)
    assert_same(run, uninterrupted)
    assert average(run) == average(uninterrupted)


def test_the_exported_average_equals_the_saved_one(make: MakeConfig, uninterrupted: Run, tmp_path: Path) -> None:
    files = uninterrupted.files
    files.write_config(make(**CHANGES).to_yaml())
    export(files.root, "3", tmp_path / "ema", ema=True)
    export(files.root, "3", tmp_path / "policy")
    assert (tmp_path / "ema" / "model.safetensors").read_bytes() == average(uninterrupted)
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() != average(uninterrupted)
    assert not (tmp_path / "policy" / "ema.safetensors").exists()
    cards = {name: (tmp_path / name / "README.md").read_text() for name in ("ema", "policy")}
    assert {name: "| weights | the moving average" in card for name, card in cards.items()} == {
        "ema": True,
        "policy": False,
    }
