"""A stage before RLHF over the API: it is listed, has curves and a config, and no services."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.cli.report import report as write_report
from quartet.config.supervised import SftConfig
from quartet.contract.control import RunState
from quartet.run_directory.locking_and_removal import lock_run_directory
from quartet.run_directory.run_files import RunFiles, RunOutcome
from tests.gateway.serving import serving

LOSSES = (3.0, 2.0, 1.5)


def written_stage(folder: Path) -> RunFiles:
    """Write the files of a stage that has taken three of four steps."""
    config = SftConfig.model_validate(
        {
            "stage": "sft",
            "run": {"name": "my-sft", "steps": 4, "directory": str(folder), "seed": 7},
            "data": {"train": "pairs.jsonl"},
            "model": {"path": "base"},
        }
    )
    files = RunFiles(config.run_directory)
    files.write_config(config.to_yaml())
    for step, loss in enumerate(LOSSES, 1):
        held_out = {"validation_loss": 2.5} if step == 2 else {}
        files.append_metrics({"step": step, "loss": loss, "tokens": 100, "seconds": 0.5, **held_out})
    return files


def test_a_stage_is_a_run_with_its_curves_and_config(tmp_path: Path) -> None:
    written_stage(tmp_path)
    with serving(tmp_path) as gateway:
        (listed,) = gateway.client.get("/runs").json()["items"]
        assert (listed["name"], listed["estimator"], listed["seed"]) == ("my-sft", "sft", 7)
        assert (listed["step"], listed["total_steps"], listed["problem"]) == (3, 4, None)
        detail = gateway.client.get("/runs/my-sft").json()
        assert (detail["has_stage"], detail["has_scores"], detail["has_critic"]) == (True, False, False)
        assert detail["metric_names"] == ["loss", "tokens", "seconds", "validation_loss"]
        curves = gateway.client.get("/runs/my-sft/metrics").json()["curves"]
        assert curves["loss"]["mean"] == list(LOSSES)
        assert curves["validation_loss"]["mean"] == [None, 2.5, None]
        assert gateway.client.get("/runs/my-sft/config").json()["config"]["model"]["path"] == "base"
        assert gateway.client.get("/runs/my-sft/guards").json() == {"settings": {}, "alerts": []}


def test_a_report_is_written_of_a_stage(tmp_path: Path) -> None:
    files = written_stage(tmp_path)
    write_report(files.root, None)
    assert "my-sft" in files.report.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("outcome", "has_model", "state"), [(False, False, "idle"), (True, True, "finished"), (True, False, "idle")]
)
def test_the_state_of_a_stage_follows_from_its_lock_and_its_model(
    tmp_path: Path, outcome: bool, has_model: bool, state: str
) -> None:
    files = written_stage(tmp_path)
    files.append_metrics({"step": 4, "loss": 1.0})
    if outcome:
        files.write_outcome(RunOutcome(RunState.FINISHED, 4))
    if has_model:
        files.reward.mkdir()
    with serving(tmp_path) as gateway:
        assert gateway.client.get("/runs/my-sft").json()["state"] == state
        if state == "idle":
            with lock_run_directory(files):
                assert gateway.client.get("/runs/my-sft").json()["state"] == "training"
            assert gateway.client.get("/runs/my-sft").json()["state"] == "idle"
