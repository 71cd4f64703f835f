"""The best checkpoint of a run: kept beyond keep_last, and the same one after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quartet.demo.toy_task import ToyTask
from quartet.run_directory.checkpoints import tagged_checkpoints
from quartet.run_directory.selection import checkpoint_at, policy_in, roll_back_to
from quartet.services.orchestrator.checkpointing import checkpoint_scheduler
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, json_lines, run_to_completion

STEPS = 4


def settings(**checkpoint: Any) -> dict[str, Any]:
    return {"run": {"steps": STEPS}, "checkpoint": {"every_steps": 1, "keep_last": 1, **checkpoint}}


def expected_step(run: Run, metric: str) -> int:
    """Return the step with the largest value, the first of equal ones."""
    values = [step[metric] for step in run.metrics]
    return values.index(max(values)) + 1


def folders(run: Run) -> list[str]:
    return sorted(path.name for path in run.files.checkpoints.iterdir() if not path.is_symlink())


@pytest.fixture(scope="module")
def run(make: MakeConfig) -> Run:
    return run_to_completion(make(**settings(best_metric="reward_mean")))


def test_the_best_checkpoint_is_kept_beyond_keep_last(run: Run) -> None:
    best = f"step-{expected_step(run, 'reward_mean'):06d}"
    assert tagged_checkpoints(run.files) == {"best": best}
    assert folders(run) == sorted({best, f"step-{STEPS:06d}"})
    assert any(note.startswith(f"checkpoint of step {int(best[5:])} is the best: ") for note in run.progress.notes)


def test_the_best_checkpoint_by_an_evaluation(make: MakeConfig, toy_task: ToyTask) -> None:
    changes = settings(best_metric="eval_kl", best_mode="min", every_steps=2)
    changes |= {
        "data": {"validation": str(toy_task.prompts)},
        "evaluation": {"every_steps": 2, "max_prompts": 2},
    }
    run = run_to_completion(make(**changes))
    assert run.code == 0, run.progress.error
    values = {line["step"]: line["eval_kl"] for line in json_lines(run.files.evaluation_summaries) if line["step"]}
    best = f"step-{min(values, key=lambda step: values[step]):06d}"
    assert values.keys() == {2, 4}
    assert tagged_checkpoints(run.files) == {"best": best}
    assert folders(run) == sorted({best, f"step-{STEPS:06d}"})


@pytest.mark.parametrize("moment", ["before the tag", "after the tag"])
def test_the_same_checkpoint_is_best_after_a_crash(
    moment: str, make: MakeConfig, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_step = expected_step(run, "reward_mean")
    config = make(**settings(best_metric="reward_mean"))
    real = checkpoint_scheduler.tag_best

    def crash(files: Any, checkpoint: Any) -> Any:
        best = None if moment == "before the tag" else real(files, checkpoint)
        if (files.checkpoints / f"step-{crash_step:06d}").exists():
            raise RuntimeError("crash")
        return best

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_scheduler, "tag_best", crash)
        with active_run(config) as active:
            assert active.finish().code == 1
    resumed = run_to_completion(config)
    assert_same(resumed, run)
    assert tagged_checkpoints(resumed.files) == tagged_checkpoints(run.files)
    # The crash was before the oldest checkpoint was dropped.
    assert set(folders(resumed)) >= set(folders(run))


@pytest.mark.slow  # tests/unit/run_directory/test_best_checkpoint.py checks the names.
def test_the_best_checkpoint_is_a_name_and_a_path(make: MakeConfig) -> None:
    config = make(**settings(best_metric="reward_mean"))
    run = run_to_completion(config)
    run.files.write_config(config.to_yaml())
    best = expected_step(run, "reward_mean")
    assert checkpoint_at(run.files, "best").step == best
    assert Path(policy_in(str(run.files.checkpoints / "best"))).resolve().parent.name == f"step-{best:06d}"
    assert roll_back_to(run.files, "best") == best
    assert tagged_checkpoints(run.files) == {"best": f"step-{best:06d}"}
