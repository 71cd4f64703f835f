"""Scoring of a step by several services at once. Failed batches are retried, then split. Trajectories that still fail are
reported.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from quartet.config.deployment import RecoveryConfig
from quartet.config.rewards import ENVIRONMENT_PART
from quartet.contract.arrays import FloatArray
from quartet.contract.generation import SamplingParameters
from quartet.contract.status import Role
from quartet.contract.trajectory import Outcome, Scores, TokenBatch, Trajectory
from quartet.contract.weights import ReferenceVersion
from quartet.errors import ConfigError, MismatchError, ScorerFailed, ServiceFailed
from quartet.rpc.clients import ActorClient, CriticClient, ReferenceClient, RewardClient
from quartet.rpc.replica_set import FrozenReplicas
from quartet.services.orchestrator.rollout.prompt_failures import PromptFailures
from quartet.services.orchestrator.rollout.scoring_queue import (
    BatchCall,
    FailedTrajectory,
    Failure,
    ServiceQueue,
    SplitResult,
    StartCall,
)
from quartet.services.orchestrator.rollout.verification import FirstTrajectories
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call

log = structlog.get_logger()

SUM_TOLERANCE = 1e-3
"""Largest difference between a score and the weighted sum of its parts, relative to the largest of them."""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory with the results of the scoring services.

    ``score`` in units of reward, with ``parts`` by name if it is a weighted sum. Reward sources score the last branch. The
    environment's rewards are part of the score. None if the run has neither a reward service nor an environment. ``logged``: see
    ``Scores``. ``reference_log_probs`` and ``values`` are float32 [response tokens]; values are 0 without a critic.
    ``policy_log_probs``, in the same shape, are those of the actor before the update of the step; None unless
    algorithm.kl_log_probs is trainer.
    """

    trajectory: Trajectory
    score: float | None
    reference_log_probs: FloatArray
    values: FloatArray
    parts: dict[str, float] = field(default_factory=dict)
    policy_log_probs: FloatArray | None = None
    logged: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoringServices:
    """The services that score a batch: reference and, if any, reward and critic. ``temperature`` is that of the rollouts.

    ``actor``, whose parameters are of ``dtype``, computes the log-probs of responses whose engine reports none, and verifies
    those that generators report. With ``scores_policy`` it computes those of all responses. Without a ``reference`` it is the
    reference, with its adapter off. ``reference_version`` returns the version that scores, None for the initial model.
    ``router_replay``: trajectories need the experts of their tokens.
    ``beside_training``: the actor may take an update meanwhile, so that it can neither verify nor compute log-probs.
    """

    reward: FrozenReplicas[RewardClient] | None
    reference: FrozenReplicas[ReferenceClient] | None
    critic: CriticClient | None
    temperature: float
    actor: ActorClient | None = None
    dtype: str = "float32"
    scores_policy: bool = False
    reference_version: Callable[[], ReferenceVersion | None] = lambda: None
    router_replay: bool = False
    beside_training: bool = False

    def check_experts(self, trajectory: Trajectory) -> None:
        """Raise ConfigError if a trajectory lacks the experts of its tokens."""
        if self.router_replay and trajectory.routed_experts is None:
            engine = f"generator {trajectory.generator}" if trajectory.generator else "the engine"
            raise ConfigError(
                f"rollout.router_replay: {engine} reports no experts of {trajectory.id}; start it with the config of the run and "
                "an engine that reports them, or set router_replay false"
            )

    def reference_log_probs(self, batch: TokenBatch) -> Future[FloatArray]:
        """Start to compute log-probs of the reference, float32 [response tokens]. An actor first finishes its generation."""
        if self.reference is None:
            assert self.actor is not None
            return self.actor.reference_log_probs(batch, self.temperature)
        version = self.reference_version()
        return self.reference.start(lambda client: client.log_probs(batch, self.temperature, version))

    def first_trajectories(self, sampling: SamplingParameters, on_response: Callable[[], None]) -> FirstTrajectories:
        """Return the check of the generators of one step."""
        actor = None if self.beside_training else self.actor
        return FirstTrajectories(actor, sampling.temperature or 1.0, self.dtype, on_response)

    def sampled_log_probs(self, trajectories: Sequence[Trajectory]) -> FloatArray:
        """Return the log-probs of the policy version that sampled, float32 [response tokens]. Waits for the actor.

        Raises ConfigError if an older policy sampled: the actor has taken updates since, so its log-probs are those of another
        policy, and importance weights would be 1. Raises FailedPrecondition if the actor is of an unexpected version.
        """
        assert self.actor is not None
        if self.beside_training:
            raise ConfigError(
                f"evaluation.generators: {trajectories[0].id} of generator {trajectories[0].generator} has no log-probs; "
                "expected those of its engine, because the actor trains meanwhile; set evaluation.generators 0, or settings with "
                "which the engine reports them, such as rollout.temperature 1"
            )
        for item in trajectories:
            oldest = min([item.policy_version, *(span.policy_version for span in item.version_spans)])
            if oldest < item.id.step - 1:
                engine = f"generator {item.generator}" if item.generator else "the engine"
                raise ConfigError(
                    f"rollout.max_off_policy_steps: {engine} reports no log-probs of {item.id}; expected those of policy version "
                    f"{oldest}, which sampled it, because the actor has only version {item.id.step - 1}; set "
                    "max_off_policy_steps 0, or settings with which the engine reports them, such as rollout.temperature 1 "
                    "(or a version of TensorRT-LLM with SamplingParams.logprobs_mode)"
                )
        call = self.actor.log_probs_of_version(
            TokenBatch.of_policy(trajectories), self.temperature, trajectories[0].policy_version
        )
        return call.result()


class Scoring:
    """Scoring of one step's trajectories, batch by batch.

    ``scored`` and ``failed_trajectories`` cover the batches that have ended. If several services fail for a trajectory, the first
    one counts.
    """

    def __init__(
        self,
        services: ScoringServices,
        fields: Mapping[int, str],
        recovery: RecoveryConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        observe: CallObserver = ignore_call,
        on_response: Callable[[], None] = lambda: None,
        weights: Mapping[str, float] | None = None,
        failures: PromptFailures | None = None,
    ) -> None:
        """``fields`` are the prompts' own fields by prompt index, for reward functions. ``observe`` receives every call.

        ``weights`` of an ensemble's parts in this step, by name; None or empty for a single source.

        ``recovery`` limits the attempts and the failed trajectories, and sets the pauses by ``clock`` (seconds). Without it, any
        failure is raised. ``failures`` decides when there are too many. ``on_response`` is called on another thread when a
        response arrives.
        """
        self.scored: list[ScoredTrajectory] = []
        self.failed_trajectories: list[FailedTrajectory] = []
        self._cured_there = Counter[str]()
        self._recovery, self._clock = recovery, clock
        self._failures = failures if failures or recovery is None else PromptFailures(recovery)
        # Each with its calls at the services, in the order of ``_queues``.
        self._batches: list[tuple[Sequence[Trajectory], list[BatchCall | None]]] = []

        def request_scores(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Future[Scores]:
            assert services.reward is not None
            if any(item.further_branches for item in trajectories):
                batch = TokenBatch.of_last_branches(trajectories)
            lines = [fields[item.id.prompt] for item in trajectories] if fields else []
            call = services.reward.start(lambda client: client.score(batch, lines, weights or None))
            observe(Role.REWARD, "score", call)
            return call

        def request_log_probs(_: Sequence[Trajectory], batch: TokenBatch) -> Future[FloatArray]:
            call = services.reference_log_probs(batch)
            observe(Role.ACTOR if services.reference is None else Role.REFERENCE, "log_probs", call)
            return call

        def request_policy_log_probs(trajectories: Sequence[Trajectory], _: TokenBatch) -> Future[FloatArray]:
            assert services.actor is not None
            batch = TokenBatch.of_policy(trajectories)
            # By now the policy has taken all updates before this step, also if an older policy generated it.
            call = services.actor.log_probs_of_version(batch, services.temperature, trajectories[0].id.step - 1)
            observe(Role.ACTOR, "log_probs", call)
            return call

        def request_values(trajectories: Sequence[Trajectory], batch: TokenBatch) -> Future[FloatArray]:
            assert services.critic is not None
            # The critic has learned from all earlier steps, even if an older policy generated this one.
            call = services.critic.values(batch, trajectories[0].id.step - 1)
            observe(Role.CRITIC, "values", call)
            return call

        def queue(send: StartCall, split_result: SplitResult, replicas: int) -> ServiceQueue:
            return ServiceQueue(send, split_result, replicas, recovery, self._record_failure, on_response, clock)

        def split_scores(scores: Scores, _: Sequence[Trajectory]) -> list[Any]:
            self._cured_there.update(scores.cured_faults)
            check_weighted_sum(scores, weights or {})
            return _split_scores(scores)

        reference, critic = services.reference.replicas() if services.reference else 1, services.critic is not None
        self._queues = (
            queue(request_scores, split_scores, services.reward.replicas()) if services.reward else None,
            queue(request_log_probs, _split_tokens, reference),
            queue(request_values, _split_tokens, 1) if critic else None,
            queue(request_policy_log_probs, _split_tokens, 1) if services.scores_policy else None,
        )

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Send one ragged batch to all services, to each as soon as it has room for it."""
        batch = TokenBatch.of(trajectories)
        self._batches.append(
            (trajectories, [queue.add(trajectories, batch) if queue else None for queue in self._queues])
        )

    def reject(self, trajectory: Trajectory) -> None:
        """Record an episode that failed in all its attempts, which has no score.

        Raises ScorerFailed without recovery, and the errors of ``advance``.
        """
        if self._recovery is None:
            # The detail may quote the policy.
            raise ScorerFailed(
                f"environment: the episode of {trajectory.id} failed with outcome {trajectory.outcome}; see the log of the "
                "environment service"
            )
        error = f"{trajectory.id}: {trajectory.outcome}: {trajectory.detail or 'no detail'}"
        attempts = self._recovery.max_attempts(trajectory.outcome)
        failed = FailedTrajectory(trajectory, attempts, error, ServiceFailed, trajectory.outcome)
        self._record_failure(failed)
        self.failed_trajectories.append(failed)

    def advance(self) -> None:
        """Process the responses that have arrived, and retry failed calls whose pause is over. Never waits.

        Raises the error of any batch if no trajectory causes it, and those of ``PromptFailures`` if too many trajectories fail.
        """
        if not sum([queue.advance() for queue in self._queues if queue]):
            return
        active = []
        for trajectories, calls in self._batches:
            if all(call is None or call.ended for call in calls):
                scored = self._split(trajectories, [call.results if call else None for call in calls])
                self.scored += scored
                if self._failures is not None:
                    self._failures.add_scored(item.trajectory.id for item in scored)
            else:
                active.append((trajectories, calls))
        self._batches = active

    def seconds_until_retry(self) -> float | None:
        """Return the seconds until the next retry is due; None if none is pending."""
        times = [queue.retry_at for queue in self._queues if queue and queue.retry_at is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def cancel(self) -> None:
        """Cancel every call."""
        for queue in self._queues:
            if queue:
                queue.cancel()

    @property
    def cured_faults(self) -> Counter[str]:
        """Number of faults that further attempts cured, by source: "" for those of a single source, and of the services."""
        return self._cured_there + Counter({"": sum(queue.cured_faults for queue in self._queues if queue)})

    @property
    def batches_in_flight(self) -> int:
        """Number of batches that have not ended."""
        return len(self._batches)

    def _record_failure(self, failed: FailedTrajectory) -> None:
        log.warning("trajectory failed", id=str(failed.trajectory.id), attempts=failed.attempts, error=failed.cause)
        assert self._failures is not None
        self._failures.add(failed)

    def _split(self, trajectories: Sequence[Trajectory], results: Sequence[list[Any] | None]) -> list[ScoredTrajectory]:
        """Return the scored trajectories of a batch, and keep the failed ones."""
        scored = []
        scores, log_probs, values, policy = results
        scores = scores or [(None, {}, {})] * len(trajectories)
        values = values or [np.zeros(len(item.response_ids), np.float32) for item in trajectories]
        policy = policy or [None] * len(trajectories)
        assert log_probs is not None
        for trajectory, *of_one in zip(trajectories, scores, log_probs, values, policy, strict=True):
            failed = next((result for result in of_one if isinstance(result, FailedTrajectory)), None)
            if failed is not None:
                self.failed_trajectories.append(failed)
                continue
            (score, parts, logged), reference, value, policy_log_probs = of_one
            if trajectory.turn_rewards:
                earned = sum(trajectory.turn_rewards)
                # Without a reward service, the score has no part beside the environment's.
                score, parts = (earned, {}) if score is None else (score + earned, {**parts, ENVIRONMENT_PART: earned})
            # Both may use a name: then the reward source counts.
            logged = {**trajectory.logged, **logged}
            scored.append(ScoredTrajectory(trajectory, score, reference, value, parts, policy_log_probs, logged))
        return scored


def check_weighted_sum(scores: Scores, weights: Mapping[str, float]) -> None:
    """Raise MismatchError if ``scores`` are not the sum of their parts by the ``weights`` that the service was sent."""
    ok = np.isfinite(scores.total)
    total = largest = np.zeros(len(ok))
    for name, weight in weights.items():
        part = weight * np.nan_to_num(scores.parts.get(name, largest * 0).astype(np.float64))
        total, largest = total + part, np.maximum(largest, np.abs(part))
    if weights and (np.abs(total - scores.total) > SUM_TOLERANCE * largest)[ok].any():
        raise MismatchError(
            "reward: a score is not the sum of its parts by the weights of this step; use a reward service that supports the "
            "weights of a request, or reward.parts with source service"
        )


def _split_scores(scores: Scores) -> list[Any]:
    """Return (score, its parts by name, what was logged) of each trajectory, or a Failure. A part without a score is left out."""
    return [
        (
            float(score),
            {name: float(numbers[row]) for name, numbers in scores.parts.items() if np.isfinite(numbers[row])},
            scores.all_logged[row],
        )
        if outcome is Outcome.OK
        else Failure(outcome, detail or f"reward: {outcome}, without a detail", ScorerFailed)
        for row, (score, outcome, detail) in enumerate(
            zip(scores.total, scores.all_outcomes, scores.all_details, strict=True)
        )
    ]


def _split_tokens(numbers: FloatArray, trajectories: Sequence[Trajectory]) -> list[Any]:
    """Split ``numbers`` [response tokens] by trajectory."""
    return list(np.split(numbers, np.cumsum([len(item.response_ids) for item in trajectories])[:-1]))
