"""The policy's own tokens in responses with observations, and the rewards of the environment between turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

import numpy as np
import torch

from quartet.contract.arrays import BoolArray, FloatArray
from quartet.contract.trajectory import Trajectory
from quartet.ppo.rewards import EarlyRewards

BranchCredit = Literal["every", "last"]
"""Branches of an episode that have its score at their end. See ``AlgorithmConfig.branch_credit``."""


class PolicyTokens:
    """The policy's own tokens among the response tokens of a step.

    ``mask`` bool [response tokens] is True at them; bool [0] if all response tokens are the policy's own. ``lengths`` int64
    [episodes] and ``branch_lengths`` int64 [branches]: their number in each trajectory and in each of its branches.
    ``episodes`` int64 [branches]: the index of the trajectory of each branch. ``is_last`` bool [branches] is True at the last
    branch of each.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.mask: BoolArray = np.zeros(0, np.bool_)
        branches = [branch for trajectory in trajectories for branch in trajectory.branches]
        if any(len(branch.segments) > len(branch.turns) + 1 for branch in branches):
            self.mask = np.concatenate([branch.response_mask for branch in branches])
        self.lengths = torch.tensor([len(trajectory.policy_ids) for trajectory in trajectories])
        self.branch_lengths = torch.tensor([len(branch.policy_ids) for branch in branches])
        counts = torch.tensor([len(trajectory.branches) for trajectory in trajectories])
        self.episodes = torch.arange(len(trajectories)).repeat_interleave(counts)
        self.is_last = torch.zeros(len(branches), dtype=torch.bool)
        self.is_last[counts.cumsum(0) - 1] = True

    @property
    def has_branches(self) -> bool:
        """Return whether any episode has more than one branch."""
        return len(self.branch_lengths) > len(self.lengths)

    def select(self, parts: Sequence[FloatArray]) -> torch.Tensor:
        """Return the numbers at the policy's tokens, [policy tokens], from ``parts``, [response tokens] together."""
        flat = np.concatenate(parts)
        return torch.from_numpy(flat[self.mask] if len(self.mask) else flat)

    def spread(self, values: torch.Tensor) -> FloatArray:
        """Return numbers [policy tokens] in their places, with 0 at observation tokens: float32 [response tokens]."""
        own = values.to(torch.float32).numpy()
        if not len(self.mask):
            return own
        result = np.zeros(len(self.mask), np.float32)
        result[self.mask] = own
        return result


def early_rewards(trajectories: Sequence[Trajectory], factor: float, credit: BranchCredit) -> EarlyRewards | None:
    """Return the environment's rewards that are not paid at the end of a branch with a score, times ``factor``, by branch.

    The score of an episode holds the rewards of all its turns. With credit "every", each branch has the score at its end, and it
    holds the rewards of its earlier turns. With "last", the last branch has it, and the rewards of all turns but the last one of
    the episode are at their own tokens. None if no trajectory has any.
    """
    index, sequence, values, start, number = [], [], list[float](), 0, 0
    for trajectory in trajectories:
        rewards, last = iter(trajectory.turn_rewards), number + len(trajectory.branches) - 1
        for branch in trajectory.branches:
            ends = start + np.cumsum([len(turn.token_ids) for turn in branch.turns])
            start = int(ends[-1])
            earned = list(islice(rewards, len(ends)))
            count = len(earned) - (credit == "every" or number == last)
            for end, reward in zip(ends[:count], earned[:count], strict=bool(earned)):
                index.append(int(end) - 1)
                sequence.append(number if credit == "every" else last)
                values.append(reward * factor)
            number += 1
    if not values:
        return None
    return EarlyRewards(torch.tensor(index), torch.tensor(sequence), torch.tensor(values, dtype=torch.float32))


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of episodes; none without an environment or an agent."""
    if not any(trajectory.turn_rewards or len(trajectory.turns) > 1 for trajectory in trajectories):
        return {}
    turns = [len(trajectory.turns) for trajectory in trajectories]
    branches = [len(trajectory.branches) for trajectory in trajectories]
    observations = [len(trajectory.response_ids) - len(trajectory.policy_ids) for trajectory in trajectories]
    return {
        "turns_mean": float(np.mean(turns)),
        "branches_mean": float(np.mean(branches)),
        "observation_tokens": int(np.sum(observations)),
    }
