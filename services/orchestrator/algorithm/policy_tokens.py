"""The policy's own tokens in responses with observations, and the rewards of the environment between turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quartet.contract.arrays import BoolArray, FloatArray
from quartet.contract.trajectory import Trajectory
from quartet.ppo.rewards import EarlyRewards


class PolicyTokens:
    """The policy's own tokens among the response tokens of a step.

    ``mask`` bool [response tokens] is True at them; bool [0] if all response tokens are the policy's own. ``lengths`` int64
    [sequences]: their number in each trajectory.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self.mask: BoolArray = np.zeros(0, np.bool_)
        if any(len(trajectory.segments) > len(trajectory.turns) + 1 for trajectory in trajectories):
            self.mask = np.concatenate([trajectory.response_mask for trajectory in trajectories])
        self.lengths = torch.tensor([len(trajectory.policy_ids) for trajectory in trajectories])

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


def early_rewards(trajectories: Sequence[Trajectory], factor: float) -> EarlyRewards | None:
    """Return the environment's rewards of all turns but the last, times ``factor``; None if no trajectory has any."""
    index, sequence, values, start = [], [], list[float](), 0
    for number, trajectory in enumerate(trajectories):
        ends = start + np.cumsum([len(turn.token_ids) for turn in trajectory.turns])
        start = int(ends[-1])
        for end, reward in zip(ends[:-1], trajectory.turn_rewards[:-1], strict=bool(trajectory.turn_rewards)):
            index.append(int(end) - 1)
            sequence.append(number)
            values.append(reward * factor)
    if not values:
        return None
    return EarlyRewards(torch.tensor(index), torch.tensor(sequence), torch.tensor(values, dtype=torch.float32))


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of episodes; none without an environment."""
    if not any(trajectory.turn_rewards for trajectory in trajectories):
        return {}
    turns = [len(trajectory.turns) for trajectory in trajectories]
    observations = [len(trajectory.response_ids) - len(trajectory.policy_ids) for trajectory in trajectories]
    return {"turns_mean": float(np.mean(turns)), "observation_tokens": int(np.sum(observations))}
