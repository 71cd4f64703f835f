"""prepare_step against the formulas written out in plain float64 Python, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from quartet.config import AlgorithmConfig
from quartet.types import FinishReason, Trajectory, TrajectoryId
from services.orchestrator.collector import ScoredTrajectory
from services.orchestrator.experience import PreparedStep, ScoreMoments, prepare_step, score_moments

check = settings(max_examples=60, deadline=None, derandomize=True)
PLAIN = ScoreMoments()


def scored(
    sample: int,
    score: float,
    log_probs: list[float],
    reference: list[float],
    values: list[float],
    truncated: bool = False,
    response_ids: list[int] | None = None,
) -> ScoredTrajectory:
    def flat(numbers: list[float]) -> np.ndarray:
        return np.array(numbers, np.float32)

    ids = np.array(response_ids or range(5, 5 + len(log_probs)), np.int32)
    trajectory = Trajectory(
        TrajectoryId("run", 4, 7, sample),
        3,
        np.array([2, 3], np.int32),
        ids,
        flat(log_probs),
        FinishReason.LENGTH if truncated else FinishReason.EOS,
    )
    return ScoredTrajectory(trajectory, score, flat(reference), flat(values))


def prepare(
    items: list[ScoredTrajectory], coefficient: float = 0.1, moments: ScoreMoments = PLAIN, **algorithm: Any
) -> PreparedStep:
    return prepare_step("run", 4, 3, items, AlgorithmConfig(**algorithm), coefficient, moments)


def expected_flat(
    items: list[ScoredTrajectory], coefficient: float, moments: ScoreMoments, algorithm: AlgorithmConfig
) -> dict[str, list[float]]:
    """Scores, advantages, returns and mask, by the definitions of numerics.md."""
    truncation = algorithm.truncation
    scores, rewards, mask = [], [], []
    for item in items:
        score = (item.score - moments.mean) / moments.std
        cut = item.trajectory.finish_reason is FinishReason.LENGTH
        if cut and truncation.treatment == "penalty":
            score -= truncation.penalty
        if cut and truncation.treatment == "scale":
            score *= truncation.scale
        scores.append(score)
        row = []
        for own, other in zip(item.trajectory.log_probs.tolist(), item.reference_log_probs.tolist(), strict=True):
            kl = abs(own - other) if algorithm.kl_estimator == "absolute" else own - other
            row.append(-coefficient * kl)
        row[-1] += score
        rewards.append(row)
        mask += [0.0 if cut and truncation.treatment == "mask" else 1.0] * len(row)
    if algorithm.whiten_rewards:
        every = [reward for row in rewards for reward in row]
        mean, deviation = moments_of(every)
        rewards = [[(reward - mean) / deviation + mean for reward in row] for row in rewards]
    advantages, returns = [], []
    for item, row in zip(items, rewards, strict=True):
        values = item.values.tolist()
        following, found = 0.0, []
        for place in reversed(range(len(row))):
            after = values[place + 1] if place + 1 < len(row) else 0.0
            following = (
                row[place]
                + algorithm.gamma * after
                - values[place]
                + algorithm.gamma * algorithm.gae_lambda * following
            )
            found.append(following)
        advantages += found[::-1]
        returns += [advantage + value for advantage, value in zip(found[::-1], values, strict=True)]
    if algorithm.normalize_advantages and any(mask):
        mean, deviation = moments_of([a for a, counts in zip(advantages, mask, strict=True) if counts])
        advantages = [(advantage - mean) / deviation for advantage in advantages]
    return {"scores": scores, "advantages": advantages, "returns": returns, "actor_mask": mask}


def moments_of(numbers: list[float]) -> tuple[float, float]:
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers) + 1e-8)


numbers = st.floats(-4, 4, width=32)


@st.composite
def steps(draw: st.DrawFn) -> list[ScoredTrajectory]:
    items = []
    for sample in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 7))
        rows = [draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(3)]
        items.append(scored(sample, draw(numbers), *rows, truncated=draw(st.booleans())))
    return items


algorithms = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([1.0, 0.9]),
        "gae_lambda": st.sampled_from([0.95, 0.0, 1.0]),
        "kl_estimator": st.sampled_from(["k1", "absolute"]),
        "whiten_rewards": st.booleans(),
        "normalize_advantages": st.booleans(),
        "truncation": st.sampled_from(
            [{"treatment": kind, "penalty": 0.75, "scale": 0.25} for kind in ("keep", "penalty", "mask", "scale")]
        ),
    }
)


@check
@given(steps(), algorithms, st.sampled_from([0.0, 0.05, 1.0]), st.sampled_from([PLAIN, ScoreMoments(0.5, 2.0)]))
def test_experience_agrees_with_the_formulas(
    items: list[ScoredTrajectory], algorithm: dict[str, Any], coefficient: float, moments: ScoreMoments
) -> None:
    expected = expected_flat(items, coefficient, moments, AlgorithmConfig(**algorithm))
    experience = prepare(items, coefficient, moments, **algorithm).experience
    # A step whose rewards or advantages are all but equal divides rounding errors by almost nothing.
    scale = 1e-4 if not (algorithm["whiten_rewards"] or algorithm["normalize_advantages"]) else 2e-2
    for name, numbers in expected.items():
        found = getattr(experience, name)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, numbers, rtol=1e-3, atol=scale, err_msg=name)


TWO = [
    scored(0, 2.0, [-1.0, -1.5], [-1.25, -1.0], [0.5, 0.25]),
    scored(1, -1.0, [-0.5], [-0.25], [1.0], truncated=True),
]
RAW = {"normalize_advantages": False, "gae_lambda": 1.0}


def test_a_hand_worked_step() -> None:
    # Token rewards: -0.1 * 0.25 = -0.025; -0.1 * -0.5 + 2 = 2.05; and -0.1 * -0.25 - 1 = -0.975.
    experience = prepare(TWO, **RAW).experience
    assert experience.returns.tolist() == pytest.approx([2.025, 2.05, -0.975], abs=1e-6)
    assert experience.advantages.tolist() == pytest.approx([1.525, 1.8, -1.975], abs=1e-6)
    assert experience.actor_mask.tolist() == [1, 1, 1]


def test_the_experience_carries_what_the_services_said_as_it_is() -> None:
    experience = prepare(TWO).experience
    assert (experience.run, experience.step, experience.policy_version) == ("run", 4, 3)
    assert experience.ids == ("run/4/7/0", "run/4/7/1")
    assert experience.batch.token_ids.tolist() == [2, 3, 5, 6, 2, 3, 5]
    assert experience.batch.response_lengths.tolist() == [2, 1]
    assert experience.log_probs.tolist() == [-1.0, -1.5, -0.5]
    assert experience.reference_log_probs.tolist() == [-1.25, -1.0, -0.25]
    assert experience.values.tolist() == [0.5, 0.25, 1.0]


@pytest.mark.parametrize(
    ("treatment", "scores", "mask", "last_return"),
    [
        ("keep", [2.0, -1.0], [1, 1, 1], -0.975),
        ("penalty", [2.0, -4.0], [1, 1, 1], -3.975),
        ("scale", [2.0, -0.5], [1, 1, 1], -0.475),
        ("mask", [2.0, -1.0], [1, 1, 0], -0.975),
    ],
)
def test_truncated_responses_are_treated_as_told_and_finished_ones_never(
    treatment: str, scores: list[float], mask: list[int], last_return: float
) -> None:
    truncation = {"treatment": treatment, "penalty": 3.0, "scale": 0.5}
    experience = prepare(TWO, **RAW, truncation=truncation).experience
    assert experience.scores.tolist() == pytest.approx(scores)
    assert experience.actor_mask.tolist() == mask
    assert experience.returns.tolist() == pytest.approx([2.025, 2.05, last_return], abs=1e-6)


def test_masked_responses_do_not_move_the_normalisation_of_the_others() -> None:
    truncation = {"treatment": "mask"}
    with_outlier = prepare([*TWO, scored(2, 1000.0, [-1.0], [-1.0], [0.0], truncated=True)], truncation=truncation)
    without = prepare(TWO, truncation=truncation)
    np.testing.assert_array_equal(with_outlier.experience.advantages[:2], without.experience.advantages[:2])


def test_normalised_scores_are_moved_before_anything_else_but_the_metrics_tell_the_raw_ones() -> None:
    prepared = prepare(TWO, moments=ScoreMoments(1.0, 0.5))
    assert prepared.experience.scores.tolist() == [2.0, -4.0]
    assert prepared.metrics["reward_mean"] == 0.5
    assert prepared.metrics["reward_std"] == 1.5


def test_the_figures_of_a_step() -> None:
    items = [*TWO, scored(2, 5.0, [-1.0] * 6, [-1.0] * 6, [0.0] * 6, response_ids=[5, 6, 7, 5, 6, 7])]
    prepared = prepare(items, coefficient=0.3, **RAW)
    metrics = prepared.metrics
    assert prepared.response_kl.tolist() == [-0.25, -0.25, 0.0]
    assert metrics["kl_mean"] == pytest.approx(-0.5 / 3)
    assert metrics["kl_coefficient"] == 0.3
    assert metrics["reward_mean"] == 2.0
    assert metrics["reward_std"] == pytest.approx(math.sqrt(6))
    assert metrics["response_tokens_mean"] == 3.0
    assert metrics["response_tokens"] == 9
    assert metrics["prompt_tokens"] == 6
    assert metrics["eos_rate"] == pytest.approx(2 / 3)
    # One of the four 3-grams of the last response repeats an earlier one; the others are too short to repeat.
    assert metrics["repetition"] == pytest.approx(1 / 4 / 3)
    returns, values = prepared.experience.returns.astype(float), prepared.experience.values.astype(float)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert metrics["advantage_std"] == pytest.approx(np.std(prepared.experience.advantages.astype(float)), abs=1e-5)


def test_the_kl_figure_is_the_plain_difference_whatever_the_penalty() -> None:
    assert prepare(TWO, kl_estimator="absolute").response_kl.tolist() == [-0.25, -0.25]


def test_moments_of_a_step() -> None:
    assert score_moments(TWO) == ScoreMoments(0.5, 1.5)
    assert score_moments(TWO[:1]) == ScoreMoments(2.0, 1.0)
