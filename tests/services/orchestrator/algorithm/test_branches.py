"""Steps with episodes of several branches, against the formulas in plain NumPy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from quartet.config.algorithm import AlgorithmConfig
from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.contract.trajectory import Branch, FinishReason, Segment, SegmentRole, Trajectory, TrajectoryId
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory

LIMIT, BETA, GAMMA, LAMBDA = 40, 0.1, 0.9, 0.8
EPISODES = [
    [[3, 2], [4]],
    [[2], [1, 5], [3]],
    [[2]],
    [[1, 1], [2]],
    [[4]],
    [[2, 2]],
]
"""Tokens of each turn in each branch of six episodes, two samples of each of three prompts. An observation of two tokens is
between two turns of a branch."""
REWARDS = [[0.5, -1.0, 2.0], [0.0, 3.0, 0.25, -0.5], [-2.0], [1.0, 1.0, -0.5], [0.75], [0.0, 1.5]]
FINAL = [0.25, -0.5, 1.0, 0.0, 2.0, -1.0]
"""Score of the reward source. The rewards of turns are added to it."""


def segments_of(generator: np.random.Generator, turns: list[int], prompt: int) -> tuple[Segment, ...]:
    parts = [Segment(SegmentRole.PROMPT, generator.integers(5, 99, prompt, dtype=np.int32))]
    for number, size in enumerate(turns):
        ids, log_probs = generator.integers(5, 99, size, dtype=np.int32), -generator.random(size).astype(np.float32)
        parts.append(Segment(SegmentRole.POLICY, ids, log_probs, 3))
        if number < len(turns) - 1:
            parts.append(Segment(SegmentRole.OBSERVATION, np.array([7, 8], np.int32)))
    return tuple(parts)


def episodes(rewards: bool = True) -> list[ScoredTrajectory]:
    generator, items = np.random.default_rng(5), []
    for index, (branches, earned, final) in enumerate(zip(EPISODES, REWARDS, FINAL, strict=True)):
        first, *further = (segments_of(generator, turns, 2 + number) for number, turns in enumerate(branches))
        trajectory = Trajectory(
            TrajectoryId("run", 4, index // 2, index % 2),
            3,
            first,
            FinishReason.DONE,
            turn_rewards=tuple(earned) if rewards else (),
            further_branches=tuple(Branch(segments) for segments in further),
        )
        count = len(trajectory.response_ids)
        reference, values = (generator.normal(-1, 1, count).astype(np.float32) for _ in range(2))
        items.append(ScoredTrajectory(trajectory, final + (sum(earned) if rewards else 0.0), reference, values))
    return items


def prepare(items: list[ScoredTrajectory], **algorithm: Any) -> PreparedStep:
    defaults = {"kl_coefficient": BETA, "gamma": GAMMA, "gae_lambda": LAMBDA, "normalize_advantages": False}
    return prepare_step("run", 4, 3, items, AlgorithmConfig(**{**defaults, **algorithm}), None, LIMIT)


def per_branch(item: ScoredTrajectory, numbers: Any) -> list[np.ndarray]:
    """Return numbers [response tokens] of an episode at the policy's tokens of each branch, float64."""
    result, start = [], 0
    for branch in item.trajectory.branches:
        size = sum(len(part.token_ids) for part in branch.segments[1:])
        own = np.concatenate([[part.role is SegmentRole.POLICY] * len(part.token_ids) for part in branch.segments[1:]])
        result.append(np.asarray(numbers[start : start + size], np.float64)[own.astype(bool)])
        start += size
    assert start == len(numbers)
    return result


def kl_of(item: ScoredTrajectory) -> list[np.ndarray]:
    """Return log π minus log π_ref at the policy's tokens of each branch."""
    return per_branch(item, np.float64(item.trajectory.log_probs) - np.float64(item.reference_log_probs))


def own_of(prepared: PreparedStep, name: str) -> np.ndarray:
    """Return an array of the experience at the policy's tokens, and check that it is 0 at all others."""
    mask, values = prepared.experience.response_mask, getattr(prepared.experience, name)
    assert not values[~mask].any()
    return values[mask]


def gae(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return advantages by the sum of its definition: A(t) = sum over l of (gamma lambda)^l delta(t + l)."""
    after = np.append(values[1:], 0.0)
    delta = rewards + GAMMA * after - values
    return np.array(
        [sum((GAMMA * LAMBDA) ** (at - t) * delta[at] for at in range(t, len(delta))) for t in range(len(delta))]
    )


def token_rewards(item: ScoredTrajectory, turns: list[list[int]], credit: str) -> list[np.ndarray]:
    """Return the rewards at the policy's tokens of each branch, by the stated rule."""
    rows, earned = [-BETA * kl for kl in kl_of(item)], list(item.trajectory.turn_rewards)
    paid_before_last, last = sum(earned[:-1]), len(turns) - 1
    for number, (row, sizes) in enumerate(zip(rows, turns, strict=True)):
        of_branch, earned = earned[: len(sizes)], earned[len(sizes) :]
        ends = np.cumsum(sizes) - 1
        if credit == "every":
            for end, reward in zip(ends[:-1], of_branch[:-1], strict=bool(of_branch)):
                row[end] += reward
            row[-1] += item.score - sum(of_branch[:-1])
            continue
        for position, (end, reward) in enumerate(zip(ends, of_branch, strict=bool(of_branch))):
            if (number, position) != (last, len(sizes) - 1):
                row[end] += reward
        if number == last:
            row[-1] += item.score - paid_before_last
    return rows


@pytest.mark.parametrize("credit", ["every", "last"])
@pytest.mark.parametrize("rewards", [True, False])
def test_gae_runs_over_each_branch_with_the_score_by_the_rule(credit: str, rewards: bool) -> None:
    items = episodes(rewards)
    prepared = prepare(items, branch_credit=credit)
    advantages, returns = [], []
    for item, turns in zip(items, EPISODES, strict=True):
        rows, values = token_rewards(item, turns, credit), per_branch(item, item.values)
        total = sum(row.sum() for row in rows) + BETA * sum(kl.sum() for kl in kl_of(item))
        assert total == pytest.approx(item.score * (len(turns) if credit == "every" else 1))
        for row, value in zip(rows, values, strict=True):
            advantages.append(gae(row, value))
            returns.append(gae(row, value) + value)
    np.testing.assert_allclose(own_of(prepared, "advantages"), np.concatenate(advantages), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own_of(prepared, "returns"), np.concatenate(returns), rtol=1e-5, atol=1e-5)
    assert own_of(prepared, "actor_mask").all()


def group_advantages(estimator: str, totals: np.ndarray) -> np.ndarray:
    """Return the advantage of each episode, of two samples to each prompt, from its score minus beta times its KL."""
    result = np.empty(len(totals))
    for start in range(0, len(totals), 2):
        group = totals[start : start + 2]
        if estimator == "grpo":
            result[start : start + 2] = (group - group.mean()) / (group.std(ddof=1) + 1e-4)
        else:
            result[start : start + 2] = group - group[::-1]
    return result


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_group_counts_episodes_and_not_branches(estimator: str) -> None:
    items = episodes()
    prepared = prepare(items, estimator=estimator, kl_loss="none")
    kl = np.array([sum(part.sum() for part in kl_of(item)) for item in items])
    totals = np.array([item.score for item in items]) - BETA * kl
    expected = np.repeat(group_advantages(estimator, totals), [sum(map(sum, turns)) for turns in EPISODES])
    np.testing.assert_allclose(own_of(prepared, "advantages"), expected, rtol=1e-4, atol=1e-5)
    assert own_of(prepared, "actor_mask").all()
    np.testing.assert_allclose(prepared.response_kl, kl, rtol=1e-5)
    assert prepared.metrics["kl_mean"] == pytest.approx(kl.mean(), rel=1e-5)


WITHOUT_CRITIC = [name for name, spec in BUILT_IN_ESTIMATORS.items() if not spec.needs_critic]
PER_RESPONSE = [name for name in WITHOUT_CRITIC if BUILT_IN_ESTIMATORS[name].granularity == "sequence"]


@pytest.mark.parametrize("estimator", PER_RESPONSE)
def test_with_credit_for_the_last_branch_an_advantage_per_response_trains_only_this_branch(estimator: str) -> None:
    items = episodes()
    every, last = (prepare(items, estimator=estimator, branch_credit=credit) for credit in ("every", "last"))
    expected = np.concatenate(
        [
            np.full(sum(turns), number == len(branches) - 1)
            for branches in EPISODES
            for number, turns in enumerate(branches)
        ]
    )
    assert own_of(last, "actor_mask").tolist() == expected.tolist()
    np.testing.assert_array_equal(last.experience.advantages, every.experience.advantages)


@pytest.mark.parametrize("estimator", [name for name in WITHOUT_CRITIC if name not in PER_RESPONSE])
def test_credit_for_the_last_branch_is_refused_for_tokens_without_a_critic(estimator: str) -> None:
    """They compare the tokens of all branches with a baseline or a mean that has the score."""
    with pytest.raises(ValueError, match=f"branch_credit last: estimator {estimator} .*leave branch_credit at every"):
        AlgorithmConfig(estimator=estimator, branch_credit="last")


@pytest.mark.parametrize("needs_critic", [True, False])
@pytest.mark.parametrize("granularity", ["token", "sequence"])
def test_credit_for_the_last_branch_fits_custom_estimators_by_their_needs(needs_critic: bool, granularity: str) -> None:
    custom = {"needs_critic": needs_critic, "granularity": granularity}
    is_refused = custom == {"needs_critic": False, "granularity": "token"}
    with pytest.raises(ValueError, match=r"branch_credit last: .*my\.module:f") if is_refused else nullcontext():
        AlgorithmConfig(estimator="my.module:f", custom_estimator=custom, branch_credit="last")


def test_normalized_advantages_see_only_the_branches_that_are_trained() -> None:
    items = episodes()
    plain = prepare(items, estimator="rloo", branch_credit="last")
    normalized = prepare(items, estimator="rloo", branch_credit="last", normalize_advantages=True)
    trained = own_of(plain, "actor_mask").astype(bool)
    raw = own_of(plain, "advantages").astype(np.float64)
    expected = (raw - raw[trained].mean()) / np.sqrt(raw[trained].var() + 1e-8)
    np.testing.assert_allclose(own_of(normalized, "advantages")[trained], expected[trained], rtol=1e-4, atol=1e-5)


def test_the_experience_has_one_sequence_and_one_id_for_each_branch() -> None:
    items = episodes()
    experience = prepare(items).experience
    branches = [branch for item in items for branch in item.trajectory.branches]
    assert [ids.tolist() for ids in experience.batch.sequences()] == [
        np.concatenate([part.token_ids for part in branch.segments]).tolist() for branch in branches
    ]
    assert experience.ids == (
        *(
            "run/4/0/0",
            "run/4/0/0#1",
            "run/4/0/1",
            "run/4/0/1#1",
            "run/4/0/1#2",
            "run/4/1/0",
            "run/4/1/1",
            "run/4/1/1#1",
        ),
        *("run/4/2/0", "run/4/2/1"),
    )
    counts = [len(turns) for turns in EPISODES]
    np.testing.assert_allclose(experience.scores, np.repeat([item.score for item in items], counts), rtol=1e-6)


def test_each_token_of_the_policy_is_trained_once() -> None:
    items = episodes()
    experience = prepare(items).experience
    flat = np.concatenate(
        [ids[size:] for ids, size in zip(experience.batch.sequences(), experience.batch.prompt_lengths, strict=True)]
    )
    turns = [turn.token_ids for item in items for turn in item.trajectory.turns]
    assert flat[experience.response_mask].tolist() == np.concatenate(turns).tolist()


def test_penalties_count_the_policys_tokens_of_the_episode_and_its_longest_branch() -> None:
    items = episodes()
    own = [sum(map(sum, turns)) for turns in EPISODES]
    longest = [max(sum(sizes) + 2 * (len(sizes) - 1) for sizes in turns) for turns in EPISODES]
    counts, scores = [len(turns) for turns in EPISODES], np.array([item.score for item in items])
    by_length = prepare(items, length_penalty={"per_token": 0.25, "free_tokens": 3}).experience.scores
    np.testing.assert_allclose(
        by_length, np.repeat(scores - 0.25 * np.maximum(0, np.array(own) - 3), counts), rtol=1e-6
    )
    by_limit = prepare(items, overlong_penalty={"buffer_tokens": 38, "penalty": 2.0}).experience.scores
    expected = scores - 2.0 * np.maximum(0, np.array(longest) - 2) / 38
    np.testing.assert_allclose(by_limit, np.repeat(expected, counts), rtol=1e-5)


def test_metrics_count_episodes() -> None:
    items = episodes()
    metrics = prepare(items).metrics
    assert metrics["branches_mean"] == pytest.approx(10 / 6)
    assert metrics["turns_mean"] == pytest.approx(14 / 6)
    assert metrics["response_tokens_mean"] == pytest.approx(sum(sum(map(sum, turns)) for turns in EPISODES) / 6)
    assert metrics["reward_mean"] == pytest.approx(np.mean([item.score for item in items]), rel=1e-6)
    assert metrics["observation_tokens"] == 2 * 4


def test_greedy_baselines_belong_to_episodes() -> None:
    items = episodes(rewards=False)
    greedy = [
        ScoredTrajectory(item.trajectory, 0.5 + index, item.reference_log_probs, item.values)
        for index, item in enumerate(items[::2])
    ]
    prepared = prepare_step(
        "run",
        4,
        3,
        items,
        AlgorithmConfig(estimator="remax", kl_coefficient=0.0, normalize_advantages=False),
        None,
        LIMIT,
        greedy,
    )
    expected = np.repeat(
        [item.score - (0.5 + index // 2) for index, item in enumerate(items)],
        [sum(map(sum, turns)) for turns in EPISODES],
    )
    np.testing.assert_allclose(own_of(prepared, "advantages"), expected, rtol=1e-5)


def test_the_teachers_term_does_not_reach_into_another_branch() -> None:
    items = episodes()
    prepared = prepare(
        items, estimator="reinforce", distillation={"coefficient": 2.0, "discount": 0.5}, kl_coefficient=0.0
    )
    plain = prepare(items, estimator="reinforce", kl_coefficient=0.0)
    term = [
        [-2.0 * sum(0.5 ** (at - t) * kl[at] for at in range(t, len(kl))) for t in range(len(kl))]
        for item in items
        for kl in kl_of(item)
    ]
    expected = own_of(plain, "advantages") + np.concatenate(term)
    np.testing.assert_allclose(own_of(prepared, "advantages"), expected, rtol=1e-4, atol=1e-5)
