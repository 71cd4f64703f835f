"""Baselines of a step: the treated scores of greedy responses, one for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quartet.config.algorithm import AlgorithmConfig
from quartet.contract.trajectory import FinishReason
from quartet.ppo.rewards import RunningMoments
from quartet.services.orchestrator.algorithm.advantages import treat_scores
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory


def baseline_scores(
    scored: Sequence[ScoredTrajectory],
    baselines: Sequence[ScoredTrajectory],
    algorithm: AlgorithmConfig,
    moments: RunningMoments | None,
    max_response_tokens: int,
) -> torch.Tensor:
    """Return the treated score of the greedy response to the prompt of each of ``scored``: float32 [sequences].

    ``baselines``: one scored greedy response for each prompt. Their scores do not enter the ``moments``.
    """
    trajectories = [item.trajectory for item in baselines]
    scores = treat_scores(
        torch.tensor([0.0 if item.score is None else item.score for item in baselines]),
        torch.tensor([item.finish_reason is FinishReason.LENGTH for item in trajectories]),
        torch.tensor([len(item.policy_ids) for item in trajectories]),
        torch.tensor([len(item.response_ids) for item in trajectories]),
        algorithm,
        moments,
        max_response_tokens,
    )
    position = {item.id.prompt: index for index, item in enumerate(trajectories)}
    return scores[torch.tensor([position[item.trajectory.id.prompt] for item in scored])]
