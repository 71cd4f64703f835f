"""Dynamic sampling: groups whose scores are all equal are replaced by groups of further prompts, in rounds.

A group is all responses to one prompt. The module only decides: it generates nothing and waits for nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil, fsum

from quartet.config import RolloutConfig
from quartet.data import PromptDraw, PromptSequence
from quartet.errors import TooManyEqualGroups
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory
from quartet.types import Prompt


class SamplingRounds:
    """The rounds of one step. The first one takes ``prompts_per_step`` prompts, each further one what the step still needs.

    Which prompts a round takes follows from the scores before it, so a repeated step takes the same ones.
    """

    def __init__(self, step: int, rollout: RolloutConfig, sequence: PromptSequence, consumed: int) -> None:
        """``consumed``: number of prompts of ``sequence`` that the steps before have consumed."""
        self._step, self._sequence, self._consumed_before = step, sequence, consumed
        self._num_groups, self._max_rounds = rollout.prompts_per_step, rollout.max_sampling_rounds
        self._draw: PromptDraw = sequence.draw(consumed, self._num_groups)
        self._rounds = 1
        self._num_drawn = 0
        self._kept: list[int] = []
        self._equal = Counter[float]()
        self._scores: list[float] = []

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of the current round."""
        return self._draw.prompts

    @property
    def consumed(self) -> int:
        """Number of prompts that the run has consumed, including those of the rounds so far."""
        return self._draw.consumed

    @property
    def num_kept(self) -> int:
        """Number of groups that the step keeps so far."""
        return len(self._kept)

    def keep(self, scored: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
        """Return the trajectories of the groups that the step keeps after a round.

        ``scored``: those kept so far and those of the round. Dropped are groups whose scores are all equal, and groups beyond the
        number that the step needs, the last drawn first.
        """
        groups = defaultdict[int, list[float]](list)
        for item in scored:
            assert item.score is not None  # The config refuses dynamic sampling without scores.
            groups[item.trajectory.id.prompt].append(item.score)
        for prompt in self.prompts:
            scores = groups[prompt.index]
            self._scores += scores
            if min(scores) == max(scores):
                self._equal[scores[0]] += 1
            elif len(self._kept) < self._num_groups:
                self._kept.append(prompt.index)
        self._num_drawn += len(self.prompts)
        kept = set(self._kept)
        return [item for item in scored if item.trajectory.id.prompt in kept]

    def next_round(self) -> bool:
        """Begin the next round. Return False if the step has its groups. Raises TooManyEqualGroups."""
        missing = self._num_groups - len(self._kept)
        if not missing:
            return False
        if self._rounds == self._max_rounds:
            raise self._limit_reached()
        # So many that the missing groups are expected among them.
        expected = ceil(missing * self._num_drawn / len(self._kept)) if self._kept else self._num_groups
        self._draw = self._sequence.draw(self.consumed, min(expected, self._num_groups), self._kept)
        self._rounds += 1
        return True

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, by name."""
        return {
            "sampling_rounds": self._rounds,
            "equal_groups": self._equal.total(),
            "prompts_consumed": self.consumed - self._consumed_before,
            # The exact sum does not depend on the order in which the scores arrived.
            "generated_reward_mean": fsum(self._scores) / len(self._scores),
        }

    def _limit_reached(self) -> TooManyEqualGroups:
        score, number = min(self._equal.items(), key=lambda item: (-item[1], item[0]))
        return TooManyEqualGroups(
            f"step {self._step}: after {self._rounds} rounds with {self._num_drawn} groups, {len(self._kept)} of "
            f"{self._num_groups} have scores that differ; in {self._equal.total()} groups all scores are equal, most often "
            f"{score:g} ({number} groups); rollout.max_sampling_rounds is {self._max_rounds}; use prompts that the policy solves "
            "only sometimes or a reward that tells responses apart, raise rollout.samples_per_prompt or rollout.temperature, or "
            "raise the limit and resume"
        )
