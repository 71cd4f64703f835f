"""Shadows and switches of the reward source: no fault of a shadow changes a bit, and a switch is part of the record of a run."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.root import Config
from quartet.services.orchestrator.step import StepTransaction
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, json_lines, run_to_completion, step_metrics, weights
from tests.training.test_live_control import changed, run_with_commands
from tests.training.test_resume import run_with_crashes

STEPS = 5
MODULE = "tests.training.switch_functions"
OLD = {"name": "old", "weight": 1.0, "source": "function", "function": f"{MODULE}:length"}
NEW = {"name": "new", "weight": 0.0, "source": "function", "function": f"{MODULE}:letters"}
SWITCH = {"reward.parts.old.weight": 0.0, "reward.parts.new.weight": 1.0}
UNREACHABLE = {"address": "127.0.0.1:1", "timeout_seconds": 1, "max_attempts": 1, "backoff_seconds": 0.001}


def config_of(make: MakeConfig, reward: dict[str, Any], **changes: Any) -> Config:
    return make(
        **{
            "run": {"steps": STEPS},
            "reward": {"model": None, **reward},
            "critic": {"model": None},
            "algorithm": {"score": {"normalize": "running"}, "truncation": {"treatment": "keep"}},
            "checkpoint": {"every_steps": 2},
            "recovery": {"backoff_seconds": 0.01},
            **changes,
        }
    )


def ensemble(*parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"source": "ensemble", "parts": list(parts), **changes}


def trained(run: Run) -> list[dict[str, float]]:
    """Return the metrics of a run without those of the parts of an ensemble."""
    own = ("reward_mean", "reward_std")
    return [
        {name: value for name, value in step.items() if not name.startswith("reward_") or name in own}
        for step in step_metrics(run)
    ]


@pytest.fixture(scope="module")
def plain(make: MakeConfig) -> Run:
    """The run with one source and no shadow."""
    return run_to_completion(config_of(make, {"source": "function", "function": f"{MODULE}:length"}, run={"steps": 2}))


def test_no_fault_of_a_shadow_changes_a_bit_of_training(plain: Run, make: MakeConfig) -> None:
    shadows: list[dict[str, Any]] = [
        {**NEW, "name": fault, "function": f"{MODULE}:faulty", "arguments": {"fault": fault}}
        for fault in ("raise", "nan", "refuse", "exit", "hang")
    ]
    unreachable = {"name": "unreachable", "weight": 0.0, "source": "service", "service": UNREACHABLE}
    reward = ensemble(OLD, NEW, unreachable, *shadows, shadow_timeout_seconds=0.3)
    run = run_to_completion(config_of(make, reward, run={"steps": 2}, recovery={"max_recoveries": 0}))
    assert trained(run) == trained(plain)
    assert weights(run) == weights(plain)
    assert not run.files.failed_trajectories.exists()
    missing = {
        part["name"]: sum(step[f"reward_{part['name']}_missing"] for step in run.metrics) for part in reward["parts"]
    }
    assert [name for name, count in missing.items() if count == 0] == ["old", "new"]


@pytest.fixture(scope="module")
def switched(make: MakeConfig) -> Run:
    """A run that gets the command in step 3."""
    with (
        pytest.MonkeyPatch.context() as patch,
        run_with_commands(config_of(make, ensemble(OLD, NEW)), {3: changed(SWITCH, "alice")}, patch) as active,
    ):
        run = active.finish()
    assert run.code == 0, run.progress.error
    return run


def test_a_switch_applies_from_one_step_on_and_resets_the_statistics(switched: Run) -> None:
    run = switched
    assert [(step["reward_old_weight"], step["reward_new_weight"]) for step in run.metrics] == [(1, 0)] * 3 + [
        (0, 1)
    ] * 2
    for step in run.metrics:
        source = "old" if step["step"] <= 3 else "new"
        assert step["reward_mean"] == pytest.approx(step[f"reward_{source}_mean"], rel=1e-6)
        assert step["reward_old_missing"] == step["reward_new_missing"] == 0
        for row in run.trajectories(int(step["step"])):
            assert row["score"] == row["parts"][source]
    # Normalized by the statistics of this step only, the scores have the mean 0.
    assert run.metrics[3]["score_mean"] == pytest.approx(0, abs=1e-6)
    lines = [(line["setting"], line["before"], line["after"], line["step"]) for line in json_lines(run.files.changes)]
    assert lines == [("reward.parts.old.weight", 1, 0, 4), ("reward.parts.new.weight", 0, 1, 4)]
    assert {line["user"] for line in json_lines(run.files.changes)} == {"alice"}


@pytest.mark.slow
def test_a_run_that_crashes_at_every_point_around_a_switch_resumes_bit_identically(
    make: MakeConfig, switched: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command arrives in step 3, and the switch applies from step 4 on."""
    real = StepTransaction._prepare

    def prepare(self: Any, now: int, leadership: Any) -> Any:
        live = self._run.live_settings
        if now == 3 and live.config_at(4).reward.part_weights["new"] == 0:
            live.change(SWITCH, "alice")
        return real(self, now, leadership)

    crashes = [("committed", 3), *((point, 4) for point in ("generate", "sealed", "updated", "committed"))]
    with monkeypatch.context() as patch:
        patch.setattr(StepTransaction, "_prepare", prepare)
        run = run_with_crashes(config_of(make, ensemble(OLD, NEW)), crashes, patch)
    assert step_metrics(run) == step_metrics(switched)
    assert weights(run) == weights(switched)
