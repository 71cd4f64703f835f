"""Failures of one step by prompt: which prompts are skipped, and when the step fails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from quartet.config.deployment import RecoveryConfig
from quartet.contract.trajectory import TrajectoryId
from quartet.errors import ServiceFailed, TooManyFailedTrajectories
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory


class PromptFailures:
    """Failures of one step. A prompt is skipped if enough of its responses failed and none has a score.

    Every decision depends on the ids and outcomes only, and not on their order, so a repeated step decides alike. Greedy
    responses are counted apart from sampled ones: they are needed as well.
    """

    def __init__(
        self,
        recovery: RecoveryConfig,
        prompts_per_step: int = 0,
        skipped_before: int = 0,
        greedy: Collection[TrajectoryId] = (),
    ) -> None:
        """With ``prompts_per_step`` 0, no prompt is skipped. ``skipped_before``: number that the steps before have skipped.

        ``greedy``: ids of the greedy responses, which may grow.
        """
        self._recovery, self._per_step, self._skipped_before = recovery, prompts_per_step, skipped_before
        self._greedy = greedy
        self._failed: dict[TrajectoryId, FailedTrajectory] = {}
        self._scored: set[tuple[int, bool]] = set()
        self.skipped: set[int] = set()
        """Indices of the skipped prompts."""

    def add(self, failed: FailedTrajectory) -> None:
        """Add a trajectory that could not be scored. Raises ServiceFailed or TooManyFailedTrajectories if the step fails."""
        id, outcome = failed.trajectory.id, failed.outcome
        self._failed.setdefault(id, failed)
        if self._recovery.outcomes.action(outcome) == "stop":
            raise TooManyFailedTrajectories(
                f"{failed.error}\n"
                f"step {id.step}: trajectory {id} could not be scored, outcome {outcome}; "
                f"recovery.outcomes.{outcome}.action is stop; fix the cause, or set retry or replace\n"
                f"see failed_trajectories.jsonl (run/step/prompt line from 0/sample)",
                list(self._failed.values()),
            )
        self._check()

    def add_scored(self, ids: Iterable[TrajectoryId]) -> None:
        """Add trajectories that have been scored. Raises as ``add``."""
        self._scored |= {self._key(id) for id in ids}
        self._check()

    def skip(self) -> set[int]:
        """Skip the prompts that are at fault, once no response is pending. Return their indices. Raises as ``add``."""
        enough = self._recovery.max_failures_per_prompt
        newly_skipped = {
            key[0] for key, failed in self._by_prompt().items() if len(failed) >= enough and self._may_skip(key, failed)
        } - self.skipped
        self.skipped |= newly_skipped
        self._check()
        return newly_skipped

    def _key(self, id: TrajectoryId) -> tuple[int, bool]:
        return id.prompt, id in self._greedy

    def _by_prompt(self) -> dict[tuple[int, bool], list[FailedTrajectory]]:
        """Return the failures by prompt index, sampled and greedy ones apart."""
        failures = defaultdict[tuple[int, bool], list[FailedTrajectory]](list)
        for id, failed in self._failed.items():
            failures[self._key(id)].append(failed)
        return failures

    def _may_skip(self, key: tuple[int, bool], failed: Iterable[FailedTrajectory]) -> bool:
        """Return whether the prompt may be the cause of all these failures."""
        outcomes = self._recovery.outcomes
        allowed = self._per_step and self._recovery.max_skipped_prompt_fraction
        return bool(allowed) and key not in self._scored and all(outcomes.skips_prompt(item.outcome) for item in failed)

    def _check(self) -> None:
        """Raise the error of the step if it has too many failures.

        The failures of a prompt that is skipped, or still may be, count as one. So no later event lowers the numbers.
        """
        failures = self._by_prompt()
        unscored = {key[0] for key, failed in failures.items() if self._may_skip(key, failed)} | self.skipped
        others = [item for item in self._failed.values() if item.trajectory.id.prompt not in unscored]
        limit, fraction = self._recovery.max_failed_trajectories, self._recovery.max_skipped_prompt_fraction
        if len(others) > limit:
            raise self._too_many_trajectories(others)
        if not unscored:
            return
        taken = self._per_step * next(iter(self._failed)).step
        in_step, in_run = (max(limit, int(fraction * number)) for number in (self._per_step, taken))
        if len(unscored) + len(others) > in_step:
            raise self._too_many_prompts(unscored, f"in a step of {self._per_step} prompts, at most {in_step}")
        if len(self.skipped) + self._skipped_before > in_run:
            before = (
                f"the steps before have skipped {self._skipped_before}; of {taken} prompts up to this step, at most"
            )
            raise self._too_many_prompts(unscored, f"{before} {in_run}")

    def _too_many_trajectories(self, failed: Sequence[FailedTrajectory]) -> Exception:
        first = failed[0]
        return self._error(
            f"{first.error}\n"
            f"step {first.trajectory.id.step}: {len(failed)} of its trajectories could not be scored, the first after "
            f"{first.attempts} attempts; recovery.max_failed_trajectories is {self._recovery.max_failed_trajectories}; "
            "fix the cause, or raise the limit\n"
            f"failed trajectories, see failed_trajectories.jsonl (run/step/prompt line from 0/sample): "
            f"{', '.join(str(item.trajectory.id) for item in failed)}"
        )

    def _too_many_prompts(self, unscored: Collection[int], allowed: str) -> Exception:
        failed = [item for item in self._failed.values() if item.trajectory.id.prompt in unscored]
        first, counts = failed[0], Counter(item.outcome for item in failed)
        outcomes = ", ".join(f"{outcome} {counts[outcome]}" for outcome in sorted(counts))
        lines = ", ".join(str(prompt) for prompt in dict.fromkeys(item.trajectory.id.prompt for item in failed))
        return self._error(
            f"{first.error}\n"
            f"step {first.trajectory.id.step}: {len(unscored)} of its prompts have no response with a score (failed responses: "
            f"{outcomes}); {allowed} may be skipped, by recovery.max_skipped_prompt_fraction "
            f"{self._recovery.max_skipped_prompt_fraction:g} and recovery.max_failed_trajectories "
            f"{self._recovery.max_failed_trajectories}; repair what failed or remove these prompts, or raise a limit\n"
            f"lines of the prompts, from 0, see failed_trajectories.jsonl: {lines}"
        )

    def _error(self, text: str) -> Exception:
        """Return the error of the step. If each trajectory failed with an error of its service, none is at fault."""
        if all(item.fault is ServiceFailed for item in self._failed.values()):
            error = ServiceFailed(text)
            error.failed_trajectories = list(self._failed.values())
            return error
        return TooManyFailedTrajectories(text, list(self._failed.values()))
