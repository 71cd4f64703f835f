"""A reference that follows the policy: the versions that score, and bit-identical runs after crashes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from quartet.buffer.connection import Redis
from quartet.run_directory.reference_versions import versions
from quartet.services.orchestrator.checkpointing import reference_synchronizer as module
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, run_to_completion
from tests.training.test_resume import crash_run, delete_run_data

CHANGES: dict[str, Any] = {
    "run": {"steps": 5},
    "actor": {"learning_rate": 1e-2},
    "reference": {"sync_steps": 2, "sync_alpha": 0.5},
    "checkpoint": {"every_steps": 3, "keep_last": 1},
}


def weights_of(run: Run, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(versions(run.files.references)[step] / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    run = run_to_completion(make(**CHANGES))
    assert run.code == 0, run.progress.error
    return run


def test_each_step_is_scored_by_the_version_before_it(make: MakeConfig, uninterrupted: Run) -> None:
    assert [step["reference_version"] for step in uninterrupted.metrics] == [0, 0, 2, 2, 4]
    # Version 0 was removed when checkpoint 3, which needs version 2, was complete.
    assert list(versions(uninterrupted.files.references)) == [2, 4]
    frozen = run_to_completion(make(**{**CHANGES, "reference": {}}))
    kl, kl_frozen = ([step["kl_mean"] for step in run.metrics] for run in (uninterrupted, frozen))
    assert kl[:2] == kl_frozen[:2]
    assert kl[2] != kl_frozen[2]
    assert "reference_version" not in frozen.metrics[0]


@pytest.mark.parametrize(
    ("crash_point", "step", "buffer_lost"),
    [
        ("committed", 4, False),  # before the synchronization that is due after the step
        ("updated", 5, True),  # recomputed from a checkpoint between two versions
    ],
)
def test_a_crashed_run_has_the_same_references(
    crash_point: str,
    step: int,
    buffer_lost: bool,
    make: MakeConfig,
    uninterrupted: Run,
    monkeypatch: pytest.MonkeyPatch,
    redis_client: Redis,
) -> None:
    config = make(**CHANGES)
    crash_run(config, crash_point, step, monkeypatch)
    if buffer_lost:
        delete_run_data(redis_client, config.run.name)
    run = run_to_completion(config)
    assert_same(run, uninterrupted)
    assert all(torch.equal(value, weights_of(uninterrupted, 4)[name]) for name, value in weights_of(run, 4).items())


@pytest.mark.slow  # The points of a crash above cover the moments before and after.
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_a_version_is_written_changes_nothing(
    moment: str, make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(**CHANGES)
    real = module.write_mixed

    def crash(*arguments: Any) -> None:
        if moment == "after":
            real(*arguments)
        if ".step-000002" in str(arguments[0]):
            raise RuntimeError("crash")
        if moment == "before":
            real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_mixed", crash)
        with active_run(config) as active:
            assert active.finish().code == 1
    run = run_to_completion(config)
    assert_same(run, uninterrupted)
    assert not list(run.files.references.glob(".*"))


@pytest.mark.slow  # A missing folder is a ConfigError of one function.
def test_a_missing_version_ends_the_run_with_its_folder(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make(**CHANGES)
    crash_run(config, "generate", 4, monkeypatch)
    folder = config.run_directory / "reference" / "step-000002"
    shutil.rmtree(folder)
    with active_run(config) as active:
        run = active.finish()
    assert run.code == 2
    assert f"reference {folder}: is missing; put the folder back" in run.progress.error
