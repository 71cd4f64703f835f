"""Records and warnings of a run about the bits of its engines, with a trial that was forced to fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from quartet.models.generation.torch_engine import TorchEngine
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, run_to_completion

WARNING = "engine torch is not batch-invariant (trial failed on "


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEngine, "_is_batch_invariant", lambda engine: False)


def recorded(run: Run) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = json.loads(run.files.identity.read_text())["engines"]
    return engines


def warnings(run: Run) -> list[str]:
    return [note for note in run.progress.notes if note.startswith(WARNING)]


def test_a_run_whose_trial_failed_warns_and_records_it(make: MakeConfig, failing: None) -> None:
    with capture_logs() as logs:
        run = run_to_completion(make())
    assert run.code == 0
    [warning] = warnings(run)
    assert "this run repeats with the actor's own engine, but with generators" in warning
    [engine] = recorded(run)
    assert (engine["name"], engine["batch_invariant"], engine["weights"]) == ("torch", False, "shared")
    assert engine["trial"].startswith("failed on ")
    [line] = [line for line in logs if line["event"] == "engine of the run"]
    assert (line["batch_invariant"], line["trial"]) == (False, engine["trial"])
    assert [line["reason"] for line in logs if line["event"] == "bits depend on the generators"] == [warning]


def test_generators_whose_trial_failed_are_warned_of_once(make: MakeConfig, failing: None) -> None:
    run = run_with_generators(make(), 2)
    assert run.code == 0
    [warning] = warnings(run)
    assert "or set rollout.generators: 0" in warning
    # Both declare the same, which is recorded once.
    assert [(engine["batch_invariant"], engine["weights"]) for engine in recorded(run)] == [(False, "tensors")]


def test_a_run_whose_trial_passes_has_no_warning_and_notes_a_resume_elsewhere(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchEngine, "_is_batch_invariant", lambda engine: True)
    config = make(run={"steps": 1}, checkpoint={"every_steps": 1})
    run = run_to_completion(config)
    assert warnings(run) == []
    [engine] = recorded(run)
    content = json.loads(run.files.identity.read_text())
    content["engines"] = [{**engine, "trial": "passed on Z", "trial_digest": "00"}]
    run.files.identity.write_text(json.dumps(content))
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
    resumed = run_to_completion(longer)
    [note] = [note for note in resumed.progress.notes if "round differently" in note]
    assert "passed on Z" in note
    assert engine["trial"] in note
    assert recorded(resumed) == [engine]
