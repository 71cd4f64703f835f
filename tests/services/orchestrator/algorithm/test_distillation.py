"""Steps of a distillation, with one turn and several, with and without scores, against plain formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.loading import parse_config
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory
from tests.services.orchestrator.algorithm.test_episodes import LIMIT, episodes, kl_of

COEFFICIENT = 0.4
SCORE_METRICS = {"reward_mean", "reward_std", "score_mean", "advantage_std", "length_reward_correlation"}

# Greedy baselines need scores, which a distillation may lack.
ESTIMATORS = [name for name, spec in BUILT_IN_ESTIMATORS.items() if not spec.needs_greedy_baseline]


def prepare(items: list[ScoredTrajectory], distillation: dict[str, float] | None, **algorithm: Any) -> PreparedStep:
    settings = AlgorithmConfig(gamma=0.9, kl_coefficient=0.0, distillation=distillation, **algorithm)
    return prepare_step("run", 4, 3, items, settings, None, LIMIT)


def without_scores(items: list[ScoredTrajectory]) -> list[ScoredTrajectory]:
    return [replace(item, score=None, parts={}, trajectory=replace(item.trajectory, turn_rewards=())) for item in items]


def terms(items: list[ScoredTrajectory], discount: float) -> list[float]:
    """Return the term of each of the policy's own tokens, observations left out."""
    result = []
    for item in items:
        row = [-kl for kl in kl_of(item)]
        result += [
            COEFFICIENT * math.fsum(discount ** (later - at) * row[later] for later in range(at, len(row)))
            for at in range(len(row))
        ]
    return result


@pytest.mark.parametrize("discount", [0.0, 0.8])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_term_is_added_to_the_advantages_of_any_estimator_at_the_policys_own_tokens(
    estimator: str, discount: float
) -> None:
    items = episodes()
    plain = prepare(items, None, estimator=estimator)
    distilled = prepare(items, {"coefficient": COEFFICIENT, "discount": discount}, estimator=estimator)
    mask = distilled.experience.response_mask
    added = distilled.experience.advantages - plain.experience.advantages
    np.testing.assert_allclose(added[mask], terms(items, discount), rtol=1e-5, atol=1e-5)
    assert not distilled.experience.advantages[~mask].any()
    np.testing.assert_array_equal(distilled.experience.returns, plain.experience.returns)


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gae"])
def test_without_scores_the_advantage_is_exactly_the_term(estimator: str) -> None:
    items = without_scores(episodes())
    prepared = prepare(items, {"coefficient": 1.0}, estimator=estimator)
    mask, experience = prepared.experience.response_mask, prepared.experience
    expected = experience.reference_log_probs.astype(np.float64) - experience.log_probs.astype(np.float64)
    np.testing.assert_array_equal(experience.advantages[mask], expected[mask].astype(np.float32))


def test_without_scores_there_are_no_metrics_and_no_numbers_of_scores() -> None:
    prepared = prepare(without_scores(episodes()), {"coefficient": 1.0}, estimator="reinforce")
    assert not SCORE_METRICS & prepared.metrics.keys()
    assert len(prepared.experience.scores) == 0
    assert prepare(episodes(), {"coefficient": 1.0}).metrics.keys() >= SCORE_METRICS


def test_the_reverse_kl_is_reported_per_token_and_per_response() -> None:
    items = episodes()
    rows = [kl_of(item) for item in items]
    metrics = prepare(items, {"coefficient": 1.0}).metrics
    assert metrics["teacher_kl"] == pytest.approx(math.fsum(map(math.fsum, rows)) / sum(map(len, rows)), rel=1e-5)
    assert metrics["kl_mean"] == pytest.approx(math.fsum(map(math.fsum, rows)) / len(rows), rel=1e-5)
    assert "teacher_kl" not in prepare(items, None).metrics


def test_masked_truncated_responses_are_not_trained_on() -> None:
    items = episodes(truncated=True)
    experience = prepare(items, {"coefficient": 1.0}, truncation={"treatment": "mask"}).experience
    own = np.cumsum([0, *(len(item.trajectory.policy_ids) for item in items)])
    mask = experience.actor_mask[experience.response_mask]
    assert not mask[own[1] : own[2]].any()
    assert mask.sum() == own[-1] - (own[2] - own[1])


@pytest.mark.parametrize("distilled", [True, False])
def test_a_student_far_from_its_teacher_raises_no_alert(distilled: bool) -> None:
    distillation = {"distillation": {"coefficient": 1.0}} if distilled else {}
    tree = {
        "data": {"prompts": "p"},
        "actor": {"model": "a"},
        "reward": {"model": "r"},
        "reference": {"model": "t"},
        "algorithm": {"kl_coefficient": 0.0, **distillation},
    }
    state = AlgorithmState(parse_config(tree, "test"))
    metrics = {"kl_mean": 500.0, "eos_rate": 1.0}
    alerts = [alert for step in range(1, 31) for alert in state.commit(metrics | {"step": step}, [None])]
    assert bool(alerts) != distilled
