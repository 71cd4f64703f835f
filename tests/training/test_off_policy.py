"""One step off-policy: each step is generated during the update before it, and failures change no bit."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from quartet import codec
from quartet.demo.toy_task import ToyTask
from quartet.models.generation.detached_torch import DetachedTorchEngine
from quartet.services.critic.critic import Critic
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from quartet.types import Role
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, json_lines, orchestrator, run_to_the_end, services
from tests.training.test_live_control import asked, steps_kept
from tests.training.test_recovery import MOMENTS, lost_for_a_while
from tests.training.test_resume import break_off
from tests.unit.models import tiny

STEPS, EVERY = 7, 5
STALE: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": EVERY},
    "rollout": {"max_off_policy_steps": 1},
    "algorithm": {"score": {"normalize": "running"}},
    "recovery": {"backoff_seconds": 0.01},
}
VERSIONS = [0, 0, 1, 2, 3, 5, 5]
"""Of the policies that generate the steps: one behind, but after the start and after a checkpoint."""


def stale(make: MakeConfig, **changes: Any) -> Any:
    return make(**{name: {**STALE.get(name, {}), **changes.get(name, {})} for name in {*STALE, *changes}})


@pytest.fixture(scope="module")
def undisturbed(make: MakeConfig) -> Run:
    return run_to_the_end(stale(make))


def test_a_step_is_generated_one_update_behind_with_importance_weights(undisturbed: Run) -> None:
    result = [{line["policy_version"] for line in undisturbed.trajectories(step)} for step in range(1, STEPS + 1)]
    assert result == [{version} for version in VERSIONS]
    behind = [step - 1 - version for step, version in enumerate(VERSIONS, 1)]
    assert [metrics["off_policy_steps"] for metrics in undisturbed.metrics] == behind
    mismatch = [metrics["rollout_mismatch_kl"] for metrics in undisturbed.metrics]
    assert [kl > 1e-9 for kl in mismatch] == [bool(steps) for steps in behind], mismatch


def test_the_next_generation_starts_before_the_update(undisturbed: Run) -> None:
    begun = list[bool]()
    for line in json_lines(undisturbed.files.timeline):
        spans = line["spans"]
        [update] = [span["start"] for span in spans if (span["service"], span["phase"]) == ("actor", "update")]
        begun.append(any(0 < span["start"] <= update for span in spans if span["phase"] == "generate"))
    # Steps 1 and 6 are generated when they begin, like 2, which is begun in 1. What follows a checkpoint is not begun before it.
    assert begun == [True, True, True, True, False, True, False]


def test_the_next_step_is_generated_during_the_update(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, update = DetachedTorchEngine._generate, Critic.update
    learned_from, in_time = defaultdict[int, threading.Event](threading.Event), list[bool]()

    def held(engine: Any, requests: Any, sampling: Any, seed: int, policy_version: int, cancelled: Any) -> Any:
        step, trajectories = requests[0].id.step, generate(engine, requests, sampling, seed, policy_version, cancelled)
        yield next(trajectories)
        if policy_version < step - 1:
            in_time.append(learned_from[step - 1].wait(60))
        yield from trajectories

    def learns(critic: Critic, run: str, step: int, *arguments: Any) -> Any:
        learned_from[step].set()
        return update(critic, run, step, *arguments)

    monkeypatch.setattr(DetachedTorchEngine, "_generate", held)
    monkeypatch.setattr(Critic, "update", learns)
    assert_same(run_to_the_end(stale(make)), undisturbed)
    assert in_time == [True] * 5


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC])
def test_a_lost_service_is_restored_with_the_same_policy_versions(
    role: Role, moment: str, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(lost_for_a_while(stale(make), moment, role, monkeypatch), undisturbed)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("where", ["generate", "sealed", "updated", "committed"])
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.sampled(3)
def test_an_off_policy_run_resumes_bit_identically(
    step: int, where: str, stays: bool, make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stale(make)
    if not stays:
        break_off(config, where, step, monkeypatch)
        assert_same(run_to_the_end(config), undisturbed)
        return
    with services(config) as started:
        break_off(started, where, step, monkeypatch)
        with orchestrator(started) as active:
            assert_same(active.finish(), undisturbed)


def test_an_evaluation_changes_nothing(make: MakeConfig, toy_task: ToyTask, undisturbed: Run) -> None:
    evaluated = run_to_the_end(
        stale(make, evaluation={"every_steps": 1, "max_prompts": 2}, data={"validation": str(toy_task.prompts)})
    )
    assert_same(evaluated, undisturbed)
    assert evaluated.progress.recoveries == 0


def test_a_requested_checkpoint_generates_the_next_step(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stale(make, checkpoint={"keep_last": 9})
    with asked(config, {3: lambda running: running.control.checkpoint()}, monkeypatch) as active:
        run = active.finish()
    assert (run.code, run.progress.recoveries) == (0, 0), run.progress.notes
    assert steps_kept(run) == ["step-000003", "step-000005", "step-000007"]
    assert [run.trajectories(step)[0]["policy_version"] for step in range(1, STEPS + 1)] == [0, 0, 1, 3, 3, 5, 5]


def test_an_update_waits_for_the_generation_that_needs_the_old_weights(
    make: MakeConfig, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = codec.generation_batch_from_proto

    def slowly(request: Any) -> Any:
        time.sleep(0.1)
        return read(request)

    monkeypatch.setattr(codec, "generation_batch_from_proto", slowly)
    run = run_to_the_end(stale(make))
    assert_same(run, undisturbed)
    assert run.progress.recoveries == 0


def test_the_checkpoint_interval_cannot_change(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stale(make)
    break_off(config, "committed", 3, monkeypatch)
    other = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 4})})
    with active_run(other) as active:
        run = active.finish()
    assert run.code == 2
    assert "checkpoint.every_steps is 4" in run.progress.error


def test_the_schedule_depends_only_on_step_and_checkpoint() -> None:
    rule = OffPolicySchedule(1, EVERY, STEPS)
    assert [rule.policy_version(step, 0) for step in range(1, STEPS + 1)] == VERSIONS
    assert rule.policy_version(4, 3) == 3, "a checkpoint that a user asked for"
    assert rule.policy_version(STEPS + 1, 0) == STEPS, "nothing is generated after the last step"
    assert [OffPolicySchedule(0, EVERY, STEPS).policy_version(step, 0) for step in range(1, 5)] == [0, 1, 2, 3]


def test_a_detached_engine_copies_the_weights_only_when_notified() -> None:
    model = tiny.causal("llama")
    engine = DetachedTorchEngine(model, frozenset(), 4, "cpu")
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(map(torch.equal, engine._model.parameters(), before))
    engine.weights_changed()
    assert all(map(torch.equal, engine._model.parameters(), model.parameters()))
