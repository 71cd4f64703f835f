"""Runs in which the weights of an engine change after they were verified: they end with the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.services.generator import attestation
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import Run, assert_same, json_lines, run_to_completion

SHORT: dict[str, Any] = {
    "run": {"steps": 3},
    # Most responses of a share wait for a slot when the first one ends.
    "rollout": {"samples_per_prompt": 2, "prompts_per_step": 8, "max_concurrent_sequences": 2},
    "recovery": {"backoff_seconds": 0.01},
}
ONE = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def _all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read all tensors back, however short the calls of the toy task are."""
    monkeypatch.setattr(attestation, "SHARE", 1.0)


def damage(engine: DetachedTorchEngine) -> None:
    """Change a tensor by one percent of its standard deviation."""
    with torch.no_grad():
        weight = engine._weights[ONE]
        weight += 0.01 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))


def damaging(monkeypatch: pytest.MonkeyPatch, generation: int, moment: str) -> list[int]:
    """Damage the engine of one generation: "before" it, or after its "first" trajectory. Return the generations so far."""
    generate, count = DetachedTorchEngine.generate, list[int]()

    def damaged(engine: Any, *arguments: Any) -> Any:
        count.append(len(arguments[0]))
        due = len(count) == generation
        if due and moment == "before":
            damage(engine)
        for index, response in enumerate(generate(engine, *arguments)):
            yield response
            if due and moment == "first" and index == 0:
                damage(engine)

    monkeypatch.setattr(DetachedTorchEngine, "generate", damaged)
    return count


def alerts(run: Run) -> list[dict[str, Any]]:
    path = run.files.root / "alerts.jsonl"
    return [line for line in json_lines(path) if line["guard"] == "weights_changed"] if path.exists() else []


@pytest.fixture(scope="module")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_completion(make(**SHORT))


@pytest.mark.parametrize("moment", ["before", "first"])
def test_a_generator_whose_weights_change_is_not_trained_on(
    moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = damaging(monkeypatch, 3, moment)
    run = run_with_generators(make(**SHORT), 2)
    assert_same(run, undisturbed)
    # Two generators in three steps; the damaged share is generated again, or the whole step.
    assert len(generations) > 6
    assert sum(line["weights_changed"] for line in run.metrics) == 1
    [alert] = alerts(run)
    assert "1 Generate calls" in alert["evidence"]
    [note] = [note for note in run.progress.notes if "discarded and generated again" in note]
    assert f"the first {ONE}, have changed since version" in note


def test_the_actors_engine_with_separate_weights_is_attested_too(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config() -> Any:
        return make(**{**SHORT, "rollout": {**SHORT["rollout"], "max_off_policy_steps": 1}})

    expected = run_to_completion(config())
    damaging(monkeypatch, 2, "first")
    run = run_to_completion(config())
    assert_same(run, expected)
    assert sum(line["weights_changed"] for line in run.metrics) == 1
    assert len(alerts(run)) == run.progress.recoveries == 1


def test_a_generator_whose_weights_change_again_is_refused_until_its_restart(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty: list[Any] = []
    generate: Callable[..., Any] = DetachedTorchEngine.generate

    def damaged(engine: Any, *arguments: Any) -> Any:
        faulty[:] = faulty or [engine]
        yield from generate(engine, *arguments)
        if engine is faulty[0]:
            damage(engine)

    monkeypatch.setattr(DetachedTorchEngine, "generate", damaged)
    run = run_with_generators(make(**SHORT), 2)
    assert_same(run, undisturbed)
    assert sum(line["weights_changed"] for line in run.metrics) == 2
    assert any("gets no work: " in note and "have changed since" in note for note in run.progress.notes)
    assert run.metrics[-1]["generators"] == 1
