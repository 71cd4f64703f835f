"""Rounds of a step: prompts that it does not keep are replaced by further prompts.

A step keeps no prompt that is skipped and, with dynamic sampling, no group whose scores are all equal. A group is all responses
to one prompt. The module only decides: it generates nothing and waits for nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import ceil, fsum

from quartet.config.rollout import RolloutConfig
from quartet.contract.trajectory import Prompt
from quartet.data.prompt_order import PromptDraw, PromptSequence
from quartet.errors import ConfigError, TooManyEqualGroups
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory


class SamplingRounds:
    """The rounds of one step. The first one takes ``prompts_per_step`` prompts, each further one what the step still needs.

    Which prompts a round takes follows from the scores before it, so a repeated step takes the same ones.
    """

    def __init__(self, step: int, rollout: RolloutConfig, sequence: PromptSequence, consumed: int) -> None:
        """``consumed``: number of prompts of ``sequence`` that earlier steps have consumed."""
        self._step, self._sequence, self._consumed_before = step, sequence, consumed
        self.num_groups, self._max_rounds = rollout.prompts_per_step, rollout.max_sampling_rounds
        """Number of prompts that the step needs."""
        self._drops_equal = rollout.dynamic_sampling
        self._draw: PromptDraw = sequence.draw(consumed, self.num_groups)
        self._rounds = 1
        self._num_drawn = 0
        self._kept: list[int] = []
        self._skipped: Collection[int] = ()
        self._equal = Counter[float]()
        self._scores: list[float] = []

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of the current round."""
        return self._draw.prompts

    @property
    def consumed(self) -> int:
        """Number of prompts of the sequence that are consumed after the rounds so far."""
        return self._draw.consumed

    @property
    def num_kept(self) -> int:
        """Number of groups that the step keeps so far."""
        return len(self._kept)

    def keep(self, scored: Sequence[ScoredTrajectory], skipped: Collection[int] = ()) -> list[ScoredTrajectory]:
        """Return the trajectories of the groups that the step keeps after a round.

        ``scored``: those kept so far and those of the round. Dropped are those of the ``skipped`` prompts, with dynamic sampling
        groups whose scores are all equal, and groups beyond the number that the step needs, the last drawn first.
        """
        self._skipped = skipped
        groups = self._scores_by_prompt(scored) if self._drops_equal else {}
        for prompt in self.prompts:
            if prompt.index in skipped:
                continue
            scores = groups.get(prompt.index, [])
            self._scores += scores
            if scores and min(scores) == max(scores):
                self._equal[scores[0]] += 1
            elif len(self._kept) < self.num_groups:
                self._kept.append(prompt.index)
        self._num_drawn += len(self.prompts)
        kept = set(self._kept)
        return [item for item in scored if item.trajectory.id.prompt in kept]

    def next_round(self) -> bool:
        """Begin the next round. Return False if the step has its groups.

        Raises TooManyEqualGroups, and ConfigError if the data has too few prompts whose responses can be scored.
        """
        missing = number = self.num_groups - len(self._kept)
        if not missing:
            return False
        if self._drops_equal:
            if self._rounds == self._max_rounds:
                raise self._limit_reached()
            # So many that the missing groups are expected among them.
            expected = ceil(missing * self._num_drawn / len(self._kept)) if self._kept else self.num_groups
            number = min(expected, self.num_groups)
        self._draw = self._sequence.draw(self.consumed, number, {*self._kept, *self._skipped})
        if not self._draw.prompts:
            lines = ", ".join(map(str, sorted(self._skipped)))
            raise ConfigError(
                f"rollout.prompts_per_step {self.num_groups}: no response to {len(self._skipped)} prompts of step {self._step} "
                f"could be scored (lines from 0: {lines}), and the data has no other prompts to replace them; give more prompts, "
                "remove these, or lower prompts_per_step"
            )
        self._rounds += 1
        return True

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step, by name. ``prompts_consumed`` tells where the next step of the sequence begins."""
        consumed = self.consumed - self._consumed_before
        if not self._drops_equal:
            return {"prompts_consumed": consumed} if consumed != self.num_groups else {}
        return {
            "sampling_rounds": self._rounds,
            "equal_groups": self._equal.total(),
            "prompts_consumed": consumed,
            # The exact sum does not depend on the order in which the scores arrived.
            "generated_reward_mean": fsum(self._scores) / len(self._scores),
        }

    def _scores_by_prompt(self, scored: Sequence[ScoredTrajectory]) -> Mapping[int, list[float]]:
        groups = defaultdict[int, list[float]](list)
        for item in scored:
            assert item.score is not None  # The config refuses dynamic sampling without scores.
            groups[item.trajectory.id.prompt].append(item.score)
        return groups

    def _limit_reached(self) -> TooManyEqualGroups:
        score, number = min(self._equal.items(), key=lambda item: (-item[1], item[0]))
        return TooManyEqualGroups(
            f"step {self._step}: after {self._rounds} rounds with {self._num_drawn} groups, {len(self._kept)} of "
            f"{self.num_groups} have scores that differ; in {self._equal.total()} groups all scores are equal, most often "
            f"{score:g} ({number} groups); rollout.max_sampling_rounds is {self._max_rounds}; use prompts that the policy solves "
            "only sometimes or a reward that tells responses apart, raise rollout.samples_per_prompt or rollout.temperature, or "
            "raise the limit and resume"
        )
