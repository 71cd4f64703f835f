"""prepare_step against the formulas in plain Python, in float64 and one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from quartet.config.algorithm import AlgorithmConfig
from quartet.contract.trajectory import FinishReason, Trajectory, TrajectoryId
from quartet.errors import ConfigError
from quartet.ppo.rewards import RunningMoments
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step, response_metrics
from quartet.services.orchestrator.checkpointing.step_artifacts import token_arrays
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory

LIMIT = 8
"""rollout.max_response_tokens of these tests."""


def moments(*scores: float) -> RunningMoments:
    result = RunningMoments()
    result.update(torch.tensor(scores))
    return result


def scored(
    sample: int,
    score: float,
    log_probs: list[float],
    reference: list[float],
    values: list[float],
    truncated: bool = False,
    response_ids: list[int] | None = None,
    prompt: int = 7,
    **parts: float,
) -> ScoredTrajectory:
    def flat(numbers: list[float]) -> np.ndarray:
        return np.array(numbers, np.float32)

    ids = np.array(response_ids or range(5, 5 + len(log_probs)), np.int32)
    trajectory = Trajectory.of_response(
        TrajectoryId("run", 4, prompt, sample),
        3,
        np.array([2, 3], np.int32),
        ids,
        flat(log_probs),
        FinishReason.LENGTH if truncated else FinishReason.EOS,
    )
    return ScoredTrajectory(trajectory, score, flat(reference), flat(values), parts)


def prepare(
    items: list[ScoredTrajectory], coefficient: float = 0.1, running: RunningMoments | None = None, **algorithm: Any
) -> PreparedStep:
    return prepare_step("run", 4, 3, items, AlgorithmConfig(kl_coefficient=coefficient, **algorithm), running, LIMIT)


def expected_score(item: ScoredTrajectory, running: RunningMoments | None, algorithm: AlgorithmConfig) -> float:
    """Return the treated score: normalized, scaled, clipped, then penalized."""
    score = item.score if running is None else (item.score - running.mean) / running.std
    score *= algorithm.score.scale
    if algorithm.score.clip is not None:
        score = max(-algorithm.score.clip, min(algorithm.score.clip, score))
    truncation = algorithm.truncation
    if item.trajectory.finish_reason is FinishReason.LENGTH:
        score -= truncation.penalty if truncation.treatment == "penalty" else 0
        score *= truncation.scale if truncation.treatment == "scale" else 1
    tokens = len(item.trajectory.response_ids)
    per_token_penalty, overlong = algorithm.length_penalty, algorithm.overlong_penalty
    score -= per_token_penalty.per_token * max(0, tokens - per_token_penalty.free_tokens)
    if overlong.buffer_tokens:
        over = tokens - (LIMIT - overlong.buffer_tokens)
        score -= overlong.penalty * min(1, max(0, over) / overlong.buffer_tokens)
    return score


def expected_flat(
    items: list[ScoredTrajectory], coefficient: float, running: RunningMoments | None, algorithm: AlgorithmConfig
) -> dict[str, list[float]]:
    """Return scores, advantages, returns and mask by the definitions in docs/numerics.md."""
    scores = [expected_score(item, running, algorithm) for item in items]
    rewards, mask = [], []
    for item, score in zip(items, scores, strict=True):
        truncated = item.trajectory.finish_reason is FinishReason.LENGTH
        row = []
        for own, reference in zip(item.trajectory.log_probs.tolist(), item.reference_log_probs.tolist(), strict=True):
            kl = abs(own - reference) if algorithm.kl_estimator == "absolute" else own - reference
            row.append(0.0 if algorithm.has_kl_loss else -coefficient * kl)
        row[-1] += score
        rewards.append(row)
        mask += [0.0 if truncated and algorithm.truncation.treatment == "mask" else 1.0] * len(row)
    if algorithm.whiten_rewards:
        flat_rewards = [reward for row in rewards for reward in row]
        mean, deviation = moments_of(flat_rewards)
        rewards = [[(reward - mean) / deviation + mean for reward in row] for row in rewards]
    if algorithm.estimator == "gae":
        advantages, returns = expected_gae(items, rewards, algorithm)
    else:
        advantages = expected_without_critic(items, rewards, algorithm)
        returns = [0.0] * len(advantages)
    normalize = algorithm.normalize_advantages
    if normalize is None:
        normalize = algorithm.estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if normalize and any(mask):
        mean, deviation = moments_of([a for a, counts in zip(advantages, mask, strict=True) if counts])
        advantages = [(advantage - mean) / deviation for advantage in advantages]
    return {"scores": scores, "advantages": advantages, "returns": returns, "actor_mask": mask}


def expected_gae(
    items: list[ScoredTrajectory], rewards: list[list[float]], algorithm: AlgorithmConfig
) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for item, row in zip(items, rewards, strict=True):
        values = item.values.tolist()
        advantage, result = 0.0, []
        for index in reversed(range(len(row))):
            after = values[index + 1] if index + 1 < len(row) else 0.0
            advantage = (
                row[index]
                + algorithm.gamma * after
                - values[index]
                + algorithm.gamma * algorithm.gae_lambda * advantage
            )
            result.append(advantage)
        advantages += result[::-1]
        returns += [total + value for total, value in zip(result[::-1], values, strict=True)]
    return advantages, returns


def expected_without_critic(
    items: list[ScoredTrajectory], rewards: list[list[float]], algorithm: AlgorithmConfig
) -> list[float]:
    """Return one advantage per token. The reward of a response is the sum of its token rewards."""
    if algorithm.estimator == "reinforce_plus_plus":
        return [
            math.fsum(algorithm.gamma ** (later - index) * row[later] for later in range(index, len(row)))
            for row in rewards
            for index in range(len(row))
        ]
    totals = [math.fsum(row) for row in rewards]
    result = []
    for index, (item, row) in enumerate(zip(items, rewards, strict=True)):
        group = [j for j, other in enumerate(items) if other.trajectory.id.prompt == item.trajectory.id.prompt]
        if algorithm.estimator == "reinforce":
            advantage = totals[index] - math.fsum(totals) / len(totals)
        elif algorithm.estimator == "rloo":
            others = [totals[j] for j in group if j != index]
            advantage = totals[index] - math.fsum(others) / len(others)
        elif algorithm.estimator == "opo":
            tokens = [len(rewards[j]) for j in group]
            baseline = math.fsum(n * totals[j] for n, j in zip(tokens, group, strict=True)) / sum(tokens)
            advantage = totals[index] - baseline
        elif algorithm.estimator == "reinforce_plus_plus_baseline":
            advantage = totals[index] - math.fsum(totals[j] for j in group) / len(group)
        else:
            mean = math.fsum(totals[j] for j in group) / len(group)
            advantage = totals[index] - mean
            if algorithm.estimator_spec.parameters["normalize_std"]:
                variance = math.fsum((totals[j] - mean) ** 2 for j in group) / (len(group) - 1)
                advantage /= math.sqrt(variance) + 1e-4
        result += [advantage] * len(row)
    return result


def moments_of(numbers: list[float]) -> tuple[float, float]:
    mean = math.fsum(numbers) / len(numbers)
    return mean, math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / len(numbers) + 1e-8)


numbers = st.floats(-4, 4, width=32)


@st.composite
def steps(draw: st.DrawFn) -> list[ScoredTrajectory]:
    """Two or three responses for each of one to three prompts, sorted by id."""
    items = []
    for prompt in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(2, 3))):
            size = draw(st.integers(1, LIMIT))
            rows = [draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(3)]
            truncated = draw(st.booleans())
            items.append(scored(sample, draw(numbers), *rows, truncated=truncated, prompt=prompt))
    return items


treatments = {
    "kl_estimator": st.sampled_from(["k1", "absolute"]),
    "normalize_advantages": st.sampled_from([None, True, False]),
    "score": st.sampled_from([{}, {"scale": 0.5}, {"clip": 1.0}, {"scale": 2.0, "clip": 3.0}]),
    "length_penalty": st.sampled_from([{}, {"per_token": 0.25}, {"per_token": 0.5, "free_tokens": 3}]),
    "overlong_penalty": st.sampled_from([{}, {"buffer_tokens": 4}, {"buffer_tokens": LIMIT, "penalty": 3.0}]),
    "truncation": st.sampled_from(
        [{"treatment": kind, "penalty": 0.75, "scale": 0.25} for kind in ("keep", "penalty", "mask", "scale")]
    ),
}
by_token = st.fixed_dictionaries(
    {
        **treatments,
        "estimator": st.sampled_from(["gae", "reinforce_plus_plus"]),
        "gamma": st.sampled_from([1.0, 0.9]),
        "gae_lambda": st.sampled_from([0.95, 0.0, 1.0]),
        "whiten_rewards": st.booleans(),
    }
)
by_response = st.fixed_dictionaries(
    {**treatments, "estimator": st.sampled_from(["reinforce", "rloo", "grpo", "opo", "reinforce_plus_plus_baseline"])}
)


@given(
    steps(),
    st.one_of(by_token, by_response),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([None, moments(-1.5, 2.5), moments(3.0)]),
)
def test_experience_matches_the_formulas(
    items: list[ScoredTrajectory], algorithm: dict[str, Any], coefficient: float, running: RunningMoments | None
) -> None:
    tree = AlgorithmConfig(**algorithm)
    expected = expected_flat(items, coefficient, running, tree)
    experience = prepare(items, coefficient, running, **algorithm).experience
    # Division by the standard deviation of almost equal numbers amplifies rounding errors.
    divides = tree.whiten_rewards or tree.normalizes_advantages or tree.estimator == "grpo"
    for name, numbers in expected.items():
        result = getattr(experience, name)
        assert result.dtype == np.float32
        np.testing.assert_allclose(result, numbers, rtol=1e-3, atol=2e-2 if divides else 1e-4, err_msg=name)


@pytest.mark.parametrize(
    "option",
    [
        {"estimator": "reinforce"},
        {"estimator": "rloo"},
        {"estimator": "grpo"},
        {"estimator": "grpo", "estimator_parameters": {"normalize_std": False}},
        {"estimator": "grpo", "estimator_parameters": {"leave_one_out": True}},
        {"estimator": "opo"},
        {"estimator": "reinforce_plus_plus_baseline"},
        {"estimator": "reinforce_plus_plus"},
        {"gamma": 0.9},
        {"gae_lambda": 0.5},
        {"length_adaptive_alpha": 0.6},
        {"kl_estimator": "absolute"},
        {"normalize_advantages": True},
        {"whiten_rewards": True},
        {"score": {"scale": 0.5}},
        {"score": {"clip": 0.5}},
        {"truncation": {"treatment": "penalty"}},
        {"truncation": {"treatment": "scale"}},
        {"truncation": {"treatment": "mask"}, "normalize_advantages": True},
        {"length_penalty": {"per_token": 0.1}},
        {"overlong_penalty": {"buffer_tokens": 7}},
    ],
    ids=str,
)
def test_every_option_changes_the_advantages(option: dict[str, Any]) -> None:
    items = [*TWO, scored(0, 0.5, [-1.0, -0.5, -2.0], [-1.5, -1.0, -1.5], [0.1, 0.2, 0.3], prompt=8)]
    items.append(scored(1, 3.0, [-0.25], [-0.5], [0.0], prompt=8))
    default = {"gae_lambda": 1.0, "normalize_advantages": False}
    plain, changed = prepare(items, **default), prepare(items, **{**default, **option})
    assert not np.allclose(plain.experience.advantages, changed.experience.advantages, atol=1e-4)


TWO = [
    scored(0, 2.0, [-1.0, -1.5], [-1.25, -1.0], [0.5, 0.25]),
    scored(1, -1.0, [-0.5], [-0.25], [1.0], truncated=True),
]
RAW = {"normalize_advantages": False, "gae_lambda": 1.0}


def test_a_step_computed_by_hand() -> None:
    # Token rewards: -0.1 * 0.25 = -0.025; -0.1 * -0.5 + 2 = 2.05; and -0.1 * -0.25 - 1 = -0.975.
    experience = prepare(TWO, **RAW).experience
    assert experience.returns.tolist() == pytest.approx([2.025, 2.05, -0.975], abs=1e-6)
    assert experience.advantages.tolist() == pytest.approx([1.525, 1.8, -1.975], abs=1e-6)
    assert experience.actor_mask.tolist() == [1, 1, 1]


def test_a_custom_estimator_receives_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "def scaled(inputs):\n    return inputs.parameters['factor'] * inputs.rewards\n"
    (tmp_path / "parameterized.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    custom = {"estimator": "parameterized:scaled", "custom_estimator": {}}
    # Rewards by hand: 2 - 0.1 * (0.25 - 0.5) = 2.025 and -1 - 0.1 * -0.25 = -0.975.
    advantages = prepare(TWO, **custom, estimator_parameters={"factor": 2.0}).experience.advantages
    assert advantages.tolist() == pytest.approx([4.05, 4.05, -1.95], abs=1e-6)
    with pytest.raises(ConfigError, match="parameterized:scaled: a trial with 2 responses failed: KeyError: 'factor'"):
        prepare(TWO, **custom)


def test_value_targets_may_have_their_own_lambda() -> None:
    plain = prepare(TWO, normalize_advantages=False, gae_lambda=0.0).experience
    decoupled = prepare(TWO, normalize_advantages=False, gae_lambda=0.0, value_lambda=1.0).experience
    assert decoupled.advantages.tolist() == plain.advantages.tolist()
    # With lambda 1 the targets are the returns of the step computed by hand; with 0 the first one is r + V of the next token.
    assert decoupled.returns.tolist() == pytest.approx([2.025, 2.05, -0.975], abs=1e-6)
    assert plain.returns[0] == pytest.approx(-0.025 + 0.25, abs=1e-6)


def test_a_lambda_by_length_leaves_the_value_targets() -> None:
    settings = {"normalize_advantages": False, "gae_lambda": 0.5}
    plain, adaptive = prepare(TWO, **settings), prepare(TWO, **settings, length_adaptive_alpha=2.0)
    assert adaptive.experience.returns.tolist() == plain.experience.returns.tolist()
    # The first response has 2 tokens: lambda 1 - 1/4. Its errors: -0.025 + 0.25 - 0.5 = -0.275 and 2.05 - 0.25 = 1.8.
    assert adaptive.experience.advantages.tolist() == pytest.approx([-0.275 + 0.75 * 1.8, 1.8, -1.975], abs=1e-6)


@pytest.mark.parametrize(("last", "expected"), [(3, -0.025 + 0.25), (4, 2.025)])
def test_while_values_are_pretrained_their_targets_are_returns(last: int, expected: float) -> None:
    # The step is step 4.
    step = prepare(TWO, normalize_advantages=False, gae_lambda=0.0, value_pretraining_steps=last)
    assert step.experience.returns[0] == pytest.approx(expected, abs=1e-6)


def test_the_kl_may_use_the_log_probs_of_the_trainer() -> None:
    trained = [[-1.1, -1.25], [-0.25]]
    items = [
        replace(item, policy_log_probs=np.array(numbers, np.float32))
        for item, numbers in zip(TWO, trained, strict=True)
    ]
    rollout, trainer = prepare(items, **RAW), prepare(items, **RAW, kl_log_probs="trainer")
    assert rollout.experience.returns.tolist() == prepare(TWO, **RAW).experience.returns.tolist()
    # KL at the tokens: -1.1 + 1.25 = 0.15, -1.25 + 1.0 = -0.25, and 0. Rewards: -0.015, 0.025 + 2, and -1.
    assert trainer.experience.returns.tolist() == pytest.approx([2.01, 2.025, -1.0], abs=1e-6)
    assert trainer.response_kl.tolist() == pytest.approx([-0.1, 0.0], abs=1e-6)
    assert trainer.experience.log_probs.tolist() == [-1.0, -1.5, -0.5], "the loss compares with the engine's"
    for source, expected in ((rollout, [0.25, -0.5, -0.25]), (trainer, [0.15, -0.25, 0.0])):
        assert source.token_kl.tolist() == pytest.approx(expected, abs=1e-6)
        assert token_arrays(source, True)["kl"].tolist() == source.token_kl.tolist(), "the records have another KL"


def test_the_experience_carries_the_results_of_the_services_unchanged() -> None:
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
def test_the_truncation_treatment_applies_only_to_truncated_responses(
    treatment: str, scores: list[float], mask: list[int], last_return: float
) -> None:
    truncation = {"treatment": treatment, "penalty": 3.0, "scale": 0.5}
    experience = prepare(TWO, **RAW, truncation=truncation).experience
    assert experience.scores.tolist() == pytest.approx(scores)
    assert experience.actor_mask.tolist() == mask
    assert experience.returns.tolist() == pytest.approx([2.025, 2.05, last_return], abs=1e-6)


def test_masked_responses_do_not_affect_the_normalisation_of_others() -> None:
    truncation = {"treatment": "mask"}
    with_outlier = prepare([*TWO, scored(2, 1000.0, [-1.0], [-1.0], [0.0], truncated=True)], truncation=truncation)
    without = prepare(TWO, truncation=truncation)
    np.testing.assert_array_equal(with_outlier.experience.advantages[:2], without.experience.advantages[:2])


def test_scores_are_normalised_first_and_metrics_report_the_raw_ones() -> None:
    prepared = prepare(TWO, running=moments(0.5, 1.5))
    assert prepared.experience.scores.tolist() == [2.0, -4.0]
    assert prepared.metrics["reward_mean"] == 0.5
    assert prepared.metrics["reward_std"] == 1.5


def test_the_metrics_of_a_step() -> None:
    items = [*TWO, scored(2, 5.0, [-1.0] * 6, [-1.0] * 6, [0.0] * 6)]
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
    returns, values = prepared.experience.returns.astype(float), prepared.experience.values.astype(float)
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-5)
    assert metrics["advantage_std"] == pytest.approx(np.std(prepared.experience.advantages.astype(float)), abs=1e-5)


def test_the_kl_metric_is_the_plain_difference_for_every_estimator() -> None:
    assert prepare(TWO, kl_estimator="absolute").response_kl.tolist() == [-0.25, -0.25]


def test_the_parts_of_an_ensemble_are_reported_before_their_weights() -> None:
    items = [
        scored(0, 2.0, [-1.0], [-1.0], [0.0], sentiment=1.0, brevity=0.5),
        scored(1, 1.0, [-1.0], [-1.0], [0.0], sentiment=2.0, brevity=-0.5),
    ]
    metrics = prepare(items).metrics
    assert (metrics["reward_sentiment_mean"], metrics["reward_brevity_mean"]) == (1.5, 0.0)
    assert metrics["reward_mean"] == 1.5


def test_what_a_reward_function_logs_is_a_metric_of_the_step() -> None:
    items = [
        replace(scored(0, 2.0, [-1.0], [-1.0], [0.0]), logged={"right": True, "length": 3, "answer": "w8"}),
        replace(scored(1, 1.0, [-1.0], [-1.0], [0.0]), logged={"right": False}),
    ]
    metrics = prepare(items).metrics
    assert {name: metrics[name] for name in metrics if name.startswith("logged_")} == {
        "logged_length": 3.0,
        "logged_right": 0.5,
    }


def test_the_treated_scores_have_a_separate_metric() -> None:
    metrics = prepare(TWO, truncation={"treatment": "penalty", "penalty": 3.0}).metrics
    assert (metrics["reward_mean"], metrics["score_mean"]) == (0.5, -1.0)


def test_without_a_critic_its_metrics_are_absent() -> None:
    assert "explained_variance" not in prepare(TWO, estimator="rloo").metrics


def test_the_length_reward_correlation_detects_a_preference_for_length() -> None:
    items = [scored(0, 1.0, [-1.0] * 4, [-1.0] * 4, [0.0] * 4), scored(1, -1.0, [-1.0] * 2, [-1.0] * 2, [0.0] * 2)]
    assert prepare(items).metrics["length_reward_correlation"] == pytest.approx(1.0)


def test_repetition_and_distinct_metrics() -> None:
    def metrics_of(*responses: list[int]) -> dict[str, float]:
        return response_metrics([np.array(ids, np.int32) for ids in responses])

    # Of 6 tokens 3 differ; of the 4 pairs 56 65 56 57 three.
    repeated = metrics_of([5, 6, 5, 6], [5, 7])
    assert (repeated["distinct_1"], repeated["distinct_2"]) == pytest.approx((3 / 6, 3 / 4))
    # One of the four 3-grams of the last response repeats an earlier one; the others are too short to repeat.
    assert metrics_of([5], [5, 6], [5, 6, 7, 5, 6, 7])["repetition"] == pytest.approx(1 / 4 / 3)
