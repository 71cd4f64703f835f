"""Which episodes of a Generate call the step does not need any more, because others of their prompts used fewer tokens."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict

from quartet.contract.trajectory import Trajectory, TrajectoryId


class Stragglers:
    """The finished episodes of each prompt, of which a step keeps those with the lowest ``Trajectory.consumption``.

    The consumption of an open episode only rises. So one that is above those of enough finished ones can be ended: whenever
    that happens, the step chooses the same trajectories.
    """

    def __init__(self, kept_samples: int) -> None:
        """``kept_samples``: number of trajectories of each prompt that the step keeps; 0 keeps all."""
        self._kept = kept_samples
        self._finished = defaultdict[int, list[tuple[int, int, int]]](list)

    def finish(self, trajectory: Trajectory) -> None:
        """Take note of an episode that has ended well, and is no greedy one."""
        insort(self._finished[trajectory.id.prompt], trajectory.consumption)

    def is_left_out(self, id: TrajectoryId, tokens: int, turns: int) -> bool:
        """Return whether the step does not need an episode with so many tokens of the policy and turns so far."""
        finished = self._finished.get(id.prompt, ())
        return 0 < self._kept <= len(finished) and (tokens, turns, id.sample) > finished[self._kept - 1]
