"""Off-policy: steps are generated during the updates before them, reproducibly after failures."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet.contract.status import Role
from quartet.contract.trajectory import NO_LOG_PROBS
from quartet.contract.update import Experience
from quartet.demo.toy_task import ToyTask
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import DetachedTorchEngine
from quartet.models.training.updates import update_policy
from quartet.rpc import base_servicers
from quartet.services.actor import actor
from quartet.services.critic.critic import Critic
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.off_policy import OffPolicySchedule
from tests.training.conftest import MakeConfig
from tests.training.runs import Run, active_run, assert_same, json_lines, run_to_completion, services
from tests.training.test_live_control import checkpoint_names, run_with_commands
from tests.training.test_recovery import run_with_lost_services
from tests.training.test_resume import crash_run
from tests.waiting import LIMIT

STEPS, CHECKPOINT_INTERVAL = 7, 5
OFF_POLICY: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every_steps": CHECKPOINT_INTERVAL},
    "rollout": {"max_off_policy_steps": 1},
    "algorithm": {"score": {"normalize": "running"}},
    "recovery": {"backoff_seconds": 0.01},
}
VERSIONS = [0, 0, 1, 2, 3, 5, 5]
"""Policy versions that generate the steps: one version behind, except at the start and after a checkpoint."""


def off_policy_config(make: MakeConfig, **changes: Any) -> Any:
    return make(**{name: {**OFF_POLICY.get(name, {}), **changes.get(name, {})} for name in {*OFF_POLICY, *changes}})


@pytest.fixture(scope="module")
def uninterrupted(make: MakeConfig) -> Run:
    return run_to_completion(off_policy_config(make))


def test_a_step_is_generated_one_update_behind_with_importance_weights(uninterrupted: Run) -> None:
    result = [{line["policy_version"] for line in uninterrupted.trajectories(step)} for step in range(1, STEPS + 1)]
    assert result == [{version} for version in VERSIONS]
    off_policy_steps = [step - 1 - version for step, version in enumerate(VERSIONS, 1)]
    assert [metrics["off_policy_steps"] for metrics in uninterrupted.metrics] == off_policy_steps
    mismatch = [metrics["rollout_mismatch_kl"] for metrics in uninterrupted.metrics]
    assert [kl > 1e-9 for kl in mismatch] == [bool(steps) for steps in off_policy_steps], mismatch


def test_the_weights_cover_the_distance_to_the_older_policy_to_the_digit(
    make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoupled loss: the old policy is the one at the start of the update, the weight is that policy to the one that sampled."""
    before: list[tuple[Any, Experience, dict[str, float]]] = []

    def recorded(
        model: Any, optimizer: Any, experience: Experience, *arguments: Any, **options: Any
    ) -> dict[str, float]:
        policy = copy.deepcopy(model)
        before.append((policy, experience, update_policy(model, optimizer, experience, *arguments, **options)))
        return before[-1][2]

    monkeypatch.setattr(actor, "update_policy", recorded)
    changes: dict[str, Any] = {"actor": {"learning_rate": 0.02}, "algorithm": {"rollout_correction": {"upper": 1.01}}}
    config = off_policy_config(make, run={"steps": 4}, **changes)
    assert run_to_completion(config).code == 0
    assert [experience.policy_version for _, experience, _ in before] == VERSIONS[:4]
    for old, experience, metrics in before:
        sampler = before[experience.policy_version][0]
        proximal, behavior = (
            response_log_probs(policy, experience.batch, config.rollout.temperature, 4096) for policy in (old, sampler)
        )
        np.testing.assert_allclose(experience.log_probs, behavior, atol=1e-4)
        ratios = np.exp(proximal.astype(np.float64) - experience.log_probs)[experience.actor_mask != 0]
        assert metrics["importance_weight"] == pytest.approx(np.minimum(ratios, 1.01).mean(), rel=1e-5)
        assert metrics["importance_weight_max"] == pytest.approx(ratios.max(), rel=1e-4)
        assert metrics["importance_truncated_fraction"] == pytest.approx((ratios > 1.01).mean(), abs=0.02)
    assert before[-1][2]["importance_weight_max"] > 1.01, "the policies are too close for this test"


@pytest.mark.parametrize("off_policy_steps", [0, 1])
def test_an_engine_without_log_probs_ends_an_off_policy_run(
    off_policy_steps: int, make: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer computes them with the policy that sampled, or not at all: weights by another policy are all 1."""
    receive = Collector._receive

    def receive_without_log_probs(collection: Any, deliveries: Any) -> None:
        for delivery in deliveries:
            segments = tuple(replace(part, log_probs=NO_LOG_PROBS) for part in delivery.trajectory.segments)
            object.__setattr__(delivery, "trajectory", replace(delivery.trajectory, segments=segments))
        receive(collection, deliveries)

    monkeypatch.setattr(Collector, "_receive", receive_without_log_probs)
    config = off_policy_config(make, run={"steps": 3}, rollout={"max_off_policy_steps": off_policy_steps})
    with active_run(config) as running:
        run = running.finish()
    if not off_policy_steps:
        assert run.code == 0
        assert [metrics["rollout_mismatch_kl"] for metrics in run.metrics] == pytest.approx([0, 0, 0], abs=1e-9)
        return
    # Step 1 is on-policy.
    assert (run.code, len(run.metrics)) == (2, 1)
    assert "rollout.max_off_policy_steps: the engine reports no log-probs of" in run.progress.error


def test_a_generation_starts_as_soon_as_its_policy_version_exists(uninterrupted: Run) -> None:
    started = list[tuple[int, int]]()
    for line in json_lines(uninterrupted.files.timeline):
        spans = line["spans"]
        [update] = [span["start"] for span in spans if (span["service"], span["phase"]) == ("actor", "update")]
        # A generation that lasts beyond a step is in the next one, too, where it starts at 0.
        generations = [span["start"] for span in spans if span["phase"] == "generate" and span["start"] > 0]
        started.append((sum(start <= update for start in generations), sum(start > update for start in generations)))
    # Steps 1 and 2 have version 0, so both start before the first update. Each update then starts the next step but one. Step 6
    # starts after the checkpoint of step 5, whose version it has, as step 7 does.
    assert started == [(2, 1), (0, 1), (0, 1), (0, 0), (0, 0), (2, 0), (0, 0)]


def test_the_next_step_is_generated_during_the_update(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, update = DetachedTorchEngine.generate, Critic.update
    parse = base_servicers.generation_batch_from_proto
    updates_started, overlapped = defaultdict[int, threading.Event](threading.Event), list[bool]()

    def delayed_generate(engine: Any, requests: Any, *arguments: Any) -> Any:
        step, responses = requests[0].id.step, generate(engine, requests, *arguments)
        yield next(responses)
        if VERSIONS[step - 1] < step - 1:
            overlapped.append(updates_started[step - 1].wait(LIMIT))
        yield from responses

    def recorded_update(critic: Critic, run: str, step: int, *arguments: Any) -> Any:
        updates_started[step].set()
        return update(critic, run, step, *arguments)

    def delayed_parse(request: Any) -> Any:
        # The request for the update arrives before the actor knows of the generation that needs the weights before it.
        time.sleep(0.1)
        return parse(request)

    monkeypatch.setattr(base_servicers, "generation_batch_from_proto", delayed_parse)
    monkeypatch.setattr(DetachedTorchEngine, "generate", delayed_generate)
    monkeypatch.setattr(Critic, "update", recorded_update)
    run = run_to_completion(off_policy_config(make))
    assert_same(run, uninterrupted)
    assert run.progress.recoveries == 0
    assert overlapped == [True] * 5


def test_lost_services_and_crashes_change_no_policy_version(
    make: MakeConfig, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services stay up until the last crash, with a checkpoint behind them. New ones lose the actor and finish the run."""
    config = off_policy_config(make)
    crashes = [*((point, 4) for point in ("generate", "sealed", "updated", "committed")), ("sealed", 6)]
    with services(config) as addressed:
        for crash_point, step in crashes:
            crash_run(addressed, crash_point, step, monkeypatch)
    losses = {(6, "update"): Role.ACTOR, (7, "update"): Role.CRITIC}
    assert_same(run_with_lost_services(config, losses, monkeypatch), uninterrupted)


def test_an_evaluation_does_not_change_the_run(make: MakeConfig, toy_task: ToyTask, uninterrupted: Run) -> None:
    evaluated = run_to_completion(
        off_policy_config(
            make, evaluation={"every_steps": 1, "max_prompts": 2}, data={"validation": str(toy_task.prompts)}
        )
    )
    assert_same(evaluated, uninterrupted)
    assert evaluated.progress.recoveries == 0


def test_a_requested_checkpoint_generates_the_next_step(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = off_policy_config(make, checkpoint={"keep_last": 9})
    with run_with_commands(config, {3: lambda running: running.control.checkpoint()}, monkeypatch) as active:
        run = active.finish()
    assert (run.code, run.progress.recoveries) == (0, 0), run.progress.notes
    assert checkpoint_names(run) == ["step-000003", "step-000005", "step-000007"]
    assert [run.trajectories(step)[0]["policy_version"] for step in range(1, STEPS + 1)] == [0, 0, 1, 3, 3, 5, 5]


def test_the_checkpoint_interval_cannot_change(make: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = off_policy_config(make)
    crash_run(config, "committed", 3, monkeypatch)
    other = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 4})})
    with active_run(other) as active:
        run = active.finish()
    assert run.code == 2
    assert "checkpoint.every_steps is 4" in run.progress.error


def test_the_schedule_depends_only_on_step_and_checkpoint() -> None:
    schedule = OffPolicySchedule(1, CHECKPOINT_INTERVAL, STEPS)
    assert [schedule.policy_version(step, 0) for step in range(1, STEPS + 1)] == VERSIONS
    assert schedule.policy_version(4, 3) == 3, "a requested checkpoint is ignored"
    assert schedule.policy_version(STEPS + 1, 0) == STEPS, "a step after the last one would be generated off-policy"
    on_policy = OffPolicySchedule(0, CHECKPOINT_INTERVAL, STEPS)
    assert [on_policy.policy_version(step, 0) for step in range(1, 5)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("behind", "versions"),
    [(2, [0, 0, 0, 1, 2, 5, 5]), (4, [0, 0, 0, 0, 0, 5, 5])],
)
def test_the_schedule_of_more_steps_starts_as_many_generations(behind: int, versions: list[int]) -> None:
    schedule = OffPolicySchedule(behind, CHECKPOINT_INTERVAL, STEPS)
    assert [schedule.policy_version(step, 0) for step in range(1, STEPS + 1)] == versions
    # Before the first update, every step of version 0 can start.
    assert schedule.startable(1, 0, 0) == range(1, 1 + versions.count(0))
    for newest in range(STEPS):
        started = schedule.startable(newest + 1, 0, newest)
        assert [*started] == [step for step in range(newest + 1, STEPS + 1) if versions[step - 1] <= newest]
        assert len(started) <= behind + 1
    assert schedule.startable(STEPS + 1, 0, STEPS) == range(STEPS + 1, STEPS + 1), "starts a step after the last"
