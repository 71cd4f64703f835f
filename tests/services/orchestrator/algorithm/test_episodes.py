"""Steps with several turns against plain formulas over the policy's own tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quartet.config.algorithm import AlgorithmConfig
from quartet.contract.trajectory import FinishReason, Segment, SegmentRole, Trajectory, TrajectoryId
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory
from tests.services.orchestrator.algorithm.test_experience import moments

LIMIT, BETA, GAMMA, LAMBDA = 30, 0.1, 0.9, 0.8
TURNS = [[3, 2, 4], [1, 5], [2], [2, 1, 1]]
"""Tokens of each turn of four episodes. An observation of two tokens follows each turn but the last."""
REWARDS = [[0.5, -1.0, 2.0], [0.0, 3.0], [-2.0], [1.0, 1.0, -0.5]]
OWN = [
    [own for index, size in enumerate(turns) for own in [True] * size + [False] * (2 if index < len(turns) - 1 else 0)]
    for turns in TURNS
]
"""True at the policy's own tokens."""


def episodes(truncated: bool = False, leading: bool = False) -> list[ScoredTrajectory]:
    """Return episodes of two prompts. ``leading``: the first one begins with an observation."""
    generator, items = np.random.default_rng(3), []
    for index, (turns, rewards) in enumerate(zip(TURNS, REWARDS, strict=True)):
        segments = [Segment(SegmentRole.PROMPT, np.array([2, 3], np.int32))]
        if leading and index == 0:
            segments.append(Segment(SegmentRole.OBSERVATION, np.array([9], np.int32)))
        for number, size in enumerate(turns):
            log_probs = -generator.random(size).astype(np.float32)
            segments.append(Segment(SegmentRole.POLICY, np.arange(5, 5 + size, dtype=np.int32), log_probs, 3))
            if number < len(turns) - 1:
                segments.append(Segment(SegmentRole.OBSERVATION, np.array([7, 8], np.int32)))
        trajectory = Trajectory(
            TrajectoryId("run", 4, index // 2, index % 2),
            3,
            tuple(segments),
            FinishReason.LENGTH if truncated and index == 1 else FinishReason.DONE,
            turn_rewards=tuple(rewards),
        )
        count = len(trajectory.response_ids)
        reference, values = (generator.normal(-1, 1, count).astype(np.float32) for _ in range(2))
        items.append(
            ScoredTrajectory(trajectory, 0.25 + sum(rewards), reference, values, {"environment": sum(rewards)})
        )
    return items


def prepare(items: list[ScoredTrajectory], running: Any = None, **algorithm: Any) -> PreparedStep:
    defaults = {"kl_coefficient": BETA, "gamma": GAMMA, "gae_lambda": LAMBDA, "normalize_advantages": False}
    return prepare_step("run", 4, 3, items, AlgorithmConfig(**{**defaults, **algorithm}), running, LIMIT)


def own_of(item: ScoredTrajectory, values: Any) -> list[float]:
    return [float(value) for value, own in zip(values, item.trajectory.response_mask, strict=True) if own]


def kl_of(item: ScoredTrajectory) -> list[float]:
    own = zip(item.trajectory.log_probs, item.reference_log_probs, item.trajectory.response_mask, strict=True)
    return [float(log_prob) - float(reference) for log_prob, reference, policy in own if policy]


def rewards_of(item: ScoredTrajectory, score: float, factor: float = 1.0) -> list[float]:
    """Return one reward per own token: the KL penalty, each turn's reward at its end, and the rest of the score at the last."""
    row = [-BETA * kl for kl in kl_of(item)]
    ends = np.cumsum([len(turn.token_ids) for turn in item.trajectory.turns]) - 1
    early = [reward * factor for reward in item.trajectory.turn_rewards[:-1]]
    for end, reward in zip(ends[:-1], early, strict=True):
        row[end] += reward
    row[-1] += score - sum(early)
    return row


def expected_gae(item: ScoredTrajectory, row: list[float]) -> tuple[list[float], list[float]]:
    values, advantage, result = own_of(item, item.values), 0.0, list[float]()
    for index in reversed(range(len(row))):
        after = values[index + 1] if index + 1 < len(row) else 0.0
        advantage = row[index] + GAMMA * after - values[index] + GAMMA * LAMBDA * advantage
        result.insert(0, advantage)
    return result, [total + value for total, value in zip(result, values, strict=True)]


def assert_at_own_tokens(prepared: PreparedStep, name: str, expected: list[float]) -> None:
    """Check an array at the policy's tokens, and that it is 0 at all others."""
    mask, values = prepared.experience.response_mask, getattr(prepared.experience, name)
    assert len(values) == len(mask) == prepared.experience.batch.response_lengths.sum()
    np.testing.assert_allclose(values[mask], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not values[~mask].any()


def test_gae_runs_over_the_policys_own_tokens() -> None:
    items = episodes()
    prepared = prepare(items)
    assert prepared.experience.response_mask.tolist() == [own for row in OWN for own in row]
    pairs = [expected_gae(item, rewards_of(item, item.score)) for item in items]
    assert_at_own_tokens(prepared, "advantages", [value for advantages, _ in pairs for value in advantages])
    assert_at_own_tokens(prepared, "returns", [value for _, returns in pairs for value in returns])
    assert_at_own_tokens(prepared, "actor_mask", [1.0] * sum(map(sum, OWN)))
    for name, source in (("reference_log_probs", "reference_log_probs"), ("values", "values")):
        assert_at_own_tokens(prepared, name, [value for item in items for value in own_of(item, getattr(item, source))])
    assert_at_own_tokens(
        prepared, "log_probs", [value for item in items for value in own_of(item, item.trajectory.log_probs)]
    )


def test_an_observation_may_come_first() -> None:
    items = episodes(leading=True)
    prepared = prepare(items)
    assert not prepared.experience.response_mask[0]
    pairs = [expected_gae(item, rewards_of(item, item.score)) for item in items]
    assert_at_own_tokens(prepared, "advantages", [value for advantages, _ in pairs for value in advantages])


@pytest.mark.parametrize("estimator", ["reinforce", "rloo", "grpo", "opo", "reinforce_plus_plus"])
def test_critic_free_advantages_are_at_the_policys_own_tokens(estimator: str) -> None:
    items = episodes()
    rows = [rewards_of(item, item.score) for item in items]
    totals = [math.fsum(row) for row in rows]
    expected = list[float]()
    for index, row in enumerate(rows):
        other = totals[index ^ 1]
        tokens, other_tokens = len(row), len(rows[index ^ 1])
        if estimator == "reinforce_plus_plus":
            expected += [
                math.fsum(GAMMA ** (later - at) * row[later] for later in range(at, len(row))) for at in range(len(row))
            ]
            continue
        advantage = {
            "reinforce": totals[index] - math.fsum(totals) / 4,
            "rloo": totals[index] - other,
            "opo": (totals[index] - other) * other_tokens / (tokens + other_tokens),
            "grpo": (totals[index] - other) / 2 / (abs(totals[index] - other) / math.sqrt(2) + 1e-4),
        }[estimator]
        expected += [advantage] * len(row)
    assert_at_own_tokens(prepare(items, estimator=estimator), "advantages", expected)


def test_normalized_and_scaled_scores_scale_the_rewards_of_turns() -> None:
    items, running = episodes(), moments(-1.5, 2.5)
    prepared = prepare(items, running, score={"scale": 0.5, "normalize": "running"})
    factor = 0.5 / running.std
    treated = [(item.score - running.mean) * factor for item in items]
    assert prepared.experience.scores.tolist() == pytest.approx(treated)
    pairs = [expected_gae(item, rewards_of(item, score, factor)) for item, score in zip(items, treated, strict=True)]
    assert_at_own_tokens(prepared, "advantages", [value for advantages, _ in pairs for value in advantages])


def test_whitening_and_clips_see_the_policys_own_tokens_only() -> None:
    items = episodes()
    plain, whitened = prepare(items), prepare(items, normalize_advantages=True)
    raw = plain.experience.advantages[plain.experience.response_mask].astype(np.float64)
    assert_at_own_tokens(whitened, "advantages", ((raw - raw.mean()) / np.sqrt(raw.var() + 1e-8)).tolist())


def test_length_penalties_count_the_policys_tokens_and_the_limit_all() -> None:
    items = episodes()
    sizes = [(sum(turns), len(own)) for turns, own in zip(TURNS, OWN, strict=True)]
    by_length = prepare(items, length_penalty={"per_token": 0.25, "free_tokens": 3}).experience.scores
    assert by_length.tolist() == pytest.approx(
        [item.score - 0.25 * max(0, own - 3) for item, (own, _) in zip(items, sizes, strict=True)]
    )
    by_limit = prepare(items, overlong_penalty={"buffer_tokens": 25, "penalty": 2.0}).experience.scores
    assert by_limit.tolist() == pytest.approx(
        [item.score - 2.0 * max(0, total - 5) / 25 for item, (_, total) in zip(items, sizes, strict=True)]
    )


def test_truncated_episodes_are_masked_at_their_own_tokens() -> None:
    prepared = prepare(episodes(truncated=True), truncation={"treatment": "mask"})
    expected = [0.0 if index == 1 else 1.0 for index, turns in enumerate(TURNS) for _ in range(sum(turns))]
    assert_at_own_tokens(prepared, "actor_mask", expected)
    assert prepared.metrics["eos_rate"] == 0.75


def test_metrics_count_the_policys_tokens() -> None:
    items = episodes()
    metrics = prepare(items).metrics
    assert metrics["response_tokens"] == sum(map(sum, TURNS))
    assert metrics["response_tokens_mean"] == sum(map(sum, TURNS)) / 4
    assert metrics["observation_tokens"] == 2 * (2 + 1 + 0 + 2)
    assert metrics["turns_mean"] == (3 + 2 + 1 + 3) / 4
    assert metrics["kl_mean"] == pytest.approx(np.mean([sum(kl_of(item)) for item in items]), rel=1e-5)
    assert metrics["reward_environment_mean"] == pytest.approx(np.mean([sum(row) for row in REWARDS]))
    assert prepare(items).response_kl.tolist() == pytest.approx([sum(kl_of(item)) for item in items], rel=1e-5)


def test_one_turn_has_no_mask() -> None:
    items = [item for item in episodes() if len(item.trajectory.turns) == 1]
    prepared = prepare(items, estimator="reinforce")
    assert len(prepared.experience.response_mask) == 0
    assert prepared.experience.policy_tokens == len(prepared.experience.advantages)
