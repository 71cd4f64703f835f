"""State of the algorithm between steps: the controllers of the KL and entropy coefficients."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.config.live_settings import with_values
from quartet.config.loading import parse_config
from quartet.config.root import Config
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.algorithm.update_request import policy_loss_of

ADAPTIVE = {"entropy_controller": {"kind": "adaptive", "target": 0.5, "step_size": 0.25}}


def config(rollout: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    tree = {"run": {"steps": 9}, "data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}
    return parse_config({**tree, "algorithm": algorithm, "rollout": rollout or {}}, "test")


def metrics(step: int, entropy: float, **more: float) -> dict[str, float]:
    return {"step": step, "kl_mean": 3.0, "kl_coefficient": 0.05, "entropy": entropy, **more}


def test_the_entropy_coefficient_follows_the_committed_entropies() -> None:
    state = AlgorithmState(config(**ADAPTIVE))
    applied = []
    for step, entropy in enumerate([0.4, 0.4, 0.6, 0.5], 1):
        applied.append(state.coefficients["entropy_coefficient"])
        state.commit(metrics(step, entropy), [1.0])
    assert [*applied, state.coefficients["entropy_coefficient"]] == [0.0, 0.25, 0.5, 0.0, 0.5]


def test_a_fixed_coefficient_has_no_state() -> None:
    state = AlgorithmState(config(entropy_coefficient=0.01))
    state.commit(metrics(1, 0.1), [1.0])
    assert "entropy_coefficient" not in state.coefficients
    assert state.state()["entropy_controller"] is None


@pytest.mark.parametrize("checkpoint", [0, 1, 3])
def test_a_restored_state_continues_with_the_same_coefficients(checkpoint: int) -> None:
    settings = config(**ADAPTIVE, kl_controller={"kind": "adaptive", "horizon": 100})
    original, saved = AlgorithmState(settings), None
    history = []
    for step, entropy in enumerate([0.4, 0.3, 0.6, 0.2], 1):
        history.append(metrics(step, entropy, kl_coefficient=original.coefficients["kl_coefficient"]))
        original.commit(history[-1], [1.0])
        saved = original.state() if step == checkpoint else saved
    restored = AlgorithmState(settings)
    restored.restore(checkpoint, saved, history[:checkpoint])
    for line in history[checkpoint:]:
        restored.replay(line, [1.0])
    assert restored.state() == original.state()
    assert restored.coefficients["entropy_coefficient"] == original.coefficients["entropy_coefficient"] == 0.5


def test_a_fork_with_another_controller_starts_anew() -> None:
    state = AlgorithmState(config(**ADAPTIVE))
    state.commit(metrics(1, 0.1), [1.0])
    forked = AlgorithmState(config(**ADAPTIVE))
    forked.restore(1, {**state.state(), "entropy_controller": None}, [metrics(1, 0.1)])
    assert forked.coefficients["entropy_coefficient"] == 0.0


def test_the_coefficients_stay_while_the_values_are_pretrained() -> None:
    kl = {"kl_controller": {"kind": "adaptive", "horizon": 100}}
    state = AlgorithmState(config(**ADAPTIVE, **kl, value_pretraining_steps=2))
    for step in (1, 2):
        state.commit(metrics(step, 0.1), [1.0])
        assert state.coefficients == {"kl_coefficient": 0.05, "entropy_coefficient": 0.0}
    state.commit(metrics(3, 0.1), [1.0])
    assert state.coefficients["kl_coefficient"] < 0.05
    assert state.coefficients["entropy_coefficient"] == 0.25


def test_a_step_without_a_finite_entropy_changes_nothing() -> None:
    state = AlgorithmState(config(**ADAPTIVE))
    state.commit(metrics(1, 0.1), [1.0])
    state.commit(metrics(2, float("nan")), [1.0])
    state.commit({"step": 3, "kl_mean": 3.0}, [1.0])
    assert state.coefficients["entropy_coefficient"] == 0.25


def test_the_coefficient_of_the_controller_is_sent() -> None:
    whole = config(entropy_coefficient=0.01)
    assert policy_loss_of(whole.algorithm, whole.rollout).entropy_coefficient == 0.01
    adapted = with_values(whole, {"entropy_coefficient": 0.0})
    assert policy_loss_of(adapted.algorithm, adapted.rollout).entropy_coefficient == 0.0


def test_what_a_fork_has_dropped_starts_from_its_initial_value() -> None:
    settings = config(
        kl_coefficient=0.3, kl_controller={"kind": "adaptive", "horizon": 100}, score={"normalize": "running"}
    )
    state, history = AlgorithmState(settings), [metrics(1, 0.1)]
    state.commit(history[0], [1.0, 3.0])
    forked = AlgorithmState(settings)
    forked.restore(1, {**state.state(), "kl_controller": None, "score_moments": None}, history)
    assert (forked.step, forked.coefficients["kl_coefficient"]) == (1, 0.3)
    forked.commit(metrics(2, 0.1), [5.0, 7.0])
    moments = forked.state()["score_moments"]
    assert (moments["count"], moments["mean"]) == (2, 6.0)


@pytest.mark.parametrize(("normalize", "count", "mean"), [("running", 4, 4.0), ("initial", 2, 2.0)])
def test_the_score_moments_are_those_of_all_scores_or_of_the_first_step(
    normalize: str, count: int, mean: float
) -> None:
    state = AlgorithmState(config(score={"normalize": normalize}))
    for step, scores in enumerate(([1.0, 3.0], [5.0, 7.0]), 1):
        state.commit(metrics(step, 0.1), scores)
    moments = state.state()["score_moments"]
    assert (moments["count"], moments["mean"]) == (count, mean)
    assert AlgorithmState(config(score={"normalize": "none"})).state()["score_moments"] is None


def test_the_consumed_and_skipped_prompts_are_those_of_the_committed_steps() -> None:
    """A step that is taken again after a crash, a rollback or in a fork begins at the same prompt."""
    history = [
        metrics(1, 0.1, prompts_consumed=9, skipped_prompts=2),
        metrics(2, 0.1),
        metrics(3, 0.1, skipped_prompts=1),
    ]
    state = AlgorithmState(config())
    for line in history:
        state.commit(line, [1.0])
    expected = (9 + 2 * config().rollout.prompts_per_step, 3)
    assert (state.prompts_consumed_before(4), state.prompts_skipped) == expected
    for checkpoint in range(4):
        restored, saved = AlgorithmState(config()), AlgorithmState(config())
        for line in history[:checkpoint]:
            saved.commit(line, [1.0])
        restored.restore(checkpoint, saved.state() if checkpoint else None, history[:checkpoint])
        for line in history[checkpoint:]:
            restored.replay(line, [1.0])
        assert (restored.prompts_consumed_before(4), restored.prompts_skipped) == expected


def test_a_step_that_is_generated_ahead_begins_where_the_last_one_that_has_ended_left_off() -> None:
    state = AlgorithmState(config(rollout={"max_off_policy_steps": 1, "prompts_per_step": 4}))
    for line in (metrics(1, 0.1, prompts_consumed=9), metrics(2, 0.1), metrics(3, 0.1, prompts_consumed=5)):
        state.commit(line, [1.0])
    assert [state.prompts_consumed_before(step) for step in (4, 5)] == [4, 14]
