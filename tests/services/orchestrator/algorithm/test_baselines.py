"""Greedy baselines of ReMax: their scores are treated like the others, and nothing else of them enters the experience."""

from __future__ import annotations

import numpy as np
import pytest

from quartet.config.algorithm import AlgorithmConfig
from quartet.services.orchestrator.algorithm.experience import prepare_step
from tests.services.orchestrator.algorithm.test_experience import LIMIT, moments, scored

SAMPLED = [
    scored(0, 1.0, [-1.0, -2.0], [-1.5, -2.0], [0, 0], prompt=7),
    scored(1, 0.0, [-1.0], [-1.0], [0], prompt=7),
    scored(0, 3.0, [-0.5, -0.5], [-0.5, -0.25], [0, 0], prompt=9),
]
GREEDY = [
    scored(2, 2.0, [-0.1] * 3, [-9.0] * 3, [0] * 3, prompt=9),
    scored(2, 0.5, [-0.1], [-9.0], [0], truncated=True, prompt=7),
]


def test_each_advantage_is_the_return_minus_the_score_of_the_greedy_response() -> None:
    algorithm = AlgorithmConfig(estimator="remax", kl_coefficient=0.1)
    prepared = prepare_step("run", 4, 3, SAMPLED, algorithm, None, LIMIT, GREEDY)
    # KL per token: 0.5, 0; 0; 0, -0.25. The baselines have none, although their KL is large.
    expected = [1 - 0.05 - 0.5, 1 - 0.5, 0 - 0.5, 3 + 0.025 - 2, 3 + 0.025 - 2]
    assert prepared.experience.advantages.tolist() == pytest.approx(expected)
    assert prepared.experience.ids == tuple(str(item.trajectory.id) for item in SAMPLED)
    assert prepared.metrics["reward_mean"] == pytest.approx(4 / 3)
    assert prepared.metrics["baseline_reward_mean"] == pytest.approx(1.25)
    assert prepared.metrics["response_tokens"] == 5


def test_baselines_get_the_treatment_of_scores() -> None:
    algorithm = AlgorithmConfig(
        estimator="remax",
        kl_coefficient=0.0,
        score={"normalize": "running", "scale": 2.0, "clip": 3.0},
        truncation={"treatment": "penalty", "penalty": 0.25},
        length_penalty={"per_token": 0.125, "free_tokens": 1},
    )
    running = moments(0.0, 2.0)  # mean 1, standard deviation 1
    prepared = prepare_step("run", 4, 3, SAMPLED, algorithm, running, LIMIT, GREEDY)
    # Greedy: (0.5 - 1) * 2 - 0.25 truncated = -1.25 for prompt 7; (2 - 1) * 2 - 2 * 0.125 = 1.75 for prompt 9.
    scores = np.array([0 - 0.125, -2, 3 - 0.125])
    expected = scores - [-1.25, -1.25, 1.75]
    assert prepared.experience.advantages.tolist() == pytest.approx(np.repeat(expected, [2, 1, 2]).tolist())
