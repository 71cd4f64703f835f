"""Formulas of NeMo-RL, transcribed: it is not on the package index.

They follow nemo_rl/algorithms/advantage_estimator.py (GeneralizedAdvantageEstimator, GRPOAdvantageEstimator) and
nemo_rl/algorithms/utils.py (calculate_baseline_and_std_per_prompt) of August 2026, one response or token after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from tests.parity.losses.batch import Batch
from tests.parity.losses.case import Results

NAME = "NeMo-RL"


def gae(
    gamma: float, gae_lambda: float, gae_lambda_value: float | None = None, length_adaptive_alpha: float = 0.0
) -> Callable[[Batch], Results]:
    """Return advantages with the policy's lambda, and value targets with the other one: [tokens]."""

    def run(batch: Batch) -> Results:
        advantages: list[float] = []
        returns: list[float] = []
        for rewards, values in zip(_split(batch, batch.token_rewards), _split(batch, batch.values), strict=True):
            policy = gae_lambda
            if length_adaptive_alpha > 0:
                policy = 1 - 1 / max(length_adaptive_alpha * len(values), 1.0)
            target = gae_lambda if gae_lambda_value is None else gae_lambda_value
            advantages += _recursion(rewards, values, gamma, policy)
            returns += [a + v for a, v in zip(_recursion(rewards, values, gamma, target), values, strict=True)]
        return {"advantages": _tensor(advantages), "returns": _tensor(returns)}

    return run


def leave_one_out(normalize_rewards: bool) -> Callable[[Batch], Results]:
    """Return the advantages of responses, with mean and standard deviation of the prompt's other responses: [sequences]."""

    def run(batch: Batch) -> Results:
        scores, groups = batch.scores.tolist(), batch.groups.tolist()
        advantages = []
        for index, score in enumerate(scores):
            others = [s for i, s in enumerate(scores) if groups[i] == groups[index] and i != index]
            advantage = score - statistics.fmean(others)
            std = statistics.stdev(others)
            advantages.append(advantage / (std + 1e-6) if normalize_rewards and std > 0 else advantage)
        return {"advantages": _tensor(advantages)}

    return run


def _recursion(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> list[float]:
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * gae_lambda * advantage
        next_value = value
        advantages.append(advantage)
    return advantages[::-1]


def _split(batch: Batch, values: Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(batch.lengths.tolist())]


def _tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
