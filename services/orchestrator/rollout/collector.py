"""Collection of a step: trajectories stream out of the buffer and are scored while generation continues."""

from __future__ import annotations

import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import structlog

from quartet.buffer.rollout_stream import Delivery, RolloutStream
from quartet.buffer.traffic import TrafficStore
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.deployment import RecoveryConfig
from quartet.contract.generation import GenerationBatch
from quartet.contract.trajectory import Outcome, Trajectory, TrajectoryId, VersionSpan
from quartet.errors import BufferFailed
from quartet.services.orchestrator.rollout.generation import PendingTrajectories
from quartet.services.orchestrator.rollout.prompt_failures import PromptFailures
from quartet.services.orchestrator.rollout.sampling_rounds import SamplingRounds
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory, Scoring, ScoringServices
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call

log = structlog.get_logger()

COMMAND_SECONDS = 0.5
"""Seconds between two looks for commands."""
QUIET_SECONDS = 1.0
"""Time without a delivery after the end of a generation, after which missing trajectories count as lost."""


class CommandWaits(Exception):
    """A command waits while a step waits for sessions. The step can be collected again later, from the same sessions."""


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """Scored and failed trajectories of a step, each sorted by id, the stream entries to acknowledge, and seconds spent.

    ``baselines``: the scored greedy responses, which are not among ``scored``. ``skipped_prompts``: indices of the prompts that
    the step has left out, because no response to them could be scored. ``cured_faults``: see ``Scoring``. ``left_out``: sorted
    ids of the trajectories that the step did not need. ``generated_tokens``: number of the policy's tokens in all trajectories.
    """

    scored: list[ScoredTrajectory]
    failed_trajectories: list[FailedTrajectory]
    entry_ids: list[str]
    generate_seconds: float
    score_seconds: float
    baselines: list[ScoredTrajectory] = field(default_factory=list)
    skipped_prompts: frozenset[int] = frozenset()
    cured_faults: Mapping[str, int] = field(default_factory=dict)
    left_out: Sequence[TrajectoryId] = ()
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplacementRule:
    """Rule for a trajectory that cannot be scored: the next sample of its prompt replaces it.

    ``recovery`` limits the attempts and the failed trajectories. ``generate`` starts the generation of one trajectory for each of
    the given prompt indices, with the sample index given for it, by the policy of the returned batch. Those of the prompts in the
    second argument are greedy.
    """

    recovery: RecoveryConfig
    generate: Callable[[Mapping[int, int], Collection[int]], tuple[GenerationBatch, PendingTrajectories]]


@dataclass(frozen=True, slots=True)
class FurtherRounds:
    """Rule for prompts that the step does not keep: ``rounds`` decides, ``generate`` starts the generation of the next round.

    ``generate`` receives the first sample index of each prompt index, 0 for those that are absent. ``skipped_before``: number of
    prompts that the steps before have skipped, because no response to them could be scored.
    """

    rounds: SamplingRounds
    generate: Callable[[Mapping[int, int]], tuple[GenerationBatch, PendingTrajectories]]
    skipped_before: int = 0


class Collector:
    """Reader of one run's rollout stream, which scores trajectories as they arrive, one step after the other.

    The thread of ``collect`` waits for one event at a time: a delivery, a response, or the end of a call.
    """

    def __init__(
        self,
        stream: RolloutStream,
        services: ScoringServices,
        score_batch_size: int,
        observe: CallObserver = ignore_call,
        turns: TurnRecordStore | TrafficStore | None = None,
        max_age: int | None = None,
        has_command: Callable[[], bool] | None = None,
    ) -> None:
        """``observe`` receives every scoring call. ``turns``: the turn records of the run, or the sessions of users.

        ``max_age``: with sessions of users, how many updates their tokens are old at most. ``has_command``: whether a command
        waits. A step that may wait long for trajectories is left for it.
        """
        self._max_age, self._has_command = max_age, has_command
        self._stream, self._services, self._size, self._observe = stream, services, score_batch_size, observe
        self._turns = turns
        # Trajectories of later steps, which arrived while an earlier step was collected.
        self._early: dict[int, list[Delivery]] = {}
        # Deliveries, the error that ended the reading, or None for anything else that may have changed.
        self._events: queue.SimpleQueue[list[Delivery] | Exception | None] = queue.SimpleQueue()
        self._reading: ExitStack | None = None

    def reset(self) -> None:
        """Stop reading, and forget the trajectories of later steps. Call it before the stream is reset, and at the end."""
        self._stop_reading()
        self._early.clear()
        events, self._events = self._events, queue.SimpleQueue()
        # Another thread may wait for an event in ``collect``.
        events.put(None)

    def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.close()

    def _start_reading(self) -> list[Delivery]:
        """Read the stream on another thread until ``reset``. Return what has been delivered since the last step.

        Reading continues between steps: what is delivered while a reader ends would be lost for this process.
        """
        deliveries, failed = list[Delivery](), False
        while not self._events.empty():
            event = self._events.get()
            failed |= isinstance(event, Exception)
            deliveries += event if isinstance(event, list) else []
        if failed:
            # The connection was lost while nothing was expected.
            self._stop_reading()
            deliveries += self._stream.delivered()
        if self._reading is None:
            self._reading = ExitStack()
            self._reading.enter_context(self._stream.listen(self._size, self._events.put))
        return deliveries

    def collect(
        self,
        batch: GenerationBatch,
        generation: PendingTrajectories,
        on_progress: Callable[[int], None],
        fields: Mapping[int, str] | None = None,
        replacement: ReplacementRule | None = None,
        weights: Mapping[str, float] | None = None,
        further: FurtherRounds | None = None,
    ) -> CollectedStep:
        """Wait for every trajectory of ``batch`` and its scores. ``on_progress`` receives the number scored so far.

        ``generation`` generates them. ``fields`` are the prompts' own fields by prompt index, for reward functions. Without
        ``replacement``, a trajectory that cannot be scored is an error. ``weights`` of an ensemble's parts, by name. With
        ``further``, prompts whose responses cannot be scored are skipped, and further rounds follow.

        A scoring batch holds ``score_batch_size`` trajectories that are neighbours in the order of their ids, so its composition
        depends neither on timing nor on the number of generators. Raises the error of generation or scoring, BufferFailed if the
        stream holds an unexpected trajectory, TooManyFailedTrajectories, TooManyEqualGroups, and CommandWaits.
        """
        start = time.perf_counter()
        self._run, self._step = batch.requests[0].id.run, batch.step
        self._on_progress, self._replacement, self._further = on_progress, replacement, further
        # By prompt index: the first sample index that is not taken, and the number of replaced trajectories, greedy ones apart.
        self._next_sample, self._replaced = Counter[int](), Counter[tuple[int, bool]]()
        self._greedy: set[TrajectoryId] = set()
        self._kept_samples = batch.episode.kept_samples if batch.episode else 0
        self._left_out: list[TrajectoryId] = []
        self._generated_tokens = 0
        recovery = replacement.recovery if replacement else None
        self._failures = self._failures_of(recovery)
        self._scoring = Scoring(
            self._services,
            fields or {},
            recovery,
            observe=self._observe,
            on_response=self._wake,
            weights=weights,
            failures=self._failures,
        )
        self._first = self._services.first_trajectories(batch.sampling, self._wake)
        self._arrivals = _Arrivals(self._max_age)
        self._entry_ids: list[str] = []
        self._quiet_since: float | None = None
        self._expect(batch, generation)
        generate_seconds = 0.0
        try:
            self._receive([*self._early.pop(self._step, []), *self._start_reading()])
            generate_seconds += self._finish_round(start)
            while further is not None:
                self._scoring.scored = further.rounds.keep(self._scoring.scored, self._skipped)
                if not further.rounds.next_round():
                    break
                round_start = time.perf_counter()
                self._expect(*further.generate(self._next_sample))
                generate_seconds += self._finish_round(round_start)
        except BaseException:
            self.reset()
            self._generation.cancel()
            self._scoring.cancel()
            self._first.cancel()
            raise
        scored = sorted(self._scoring.scored, key=lambda item: item.trajectory.id)
        return CollectedStep(
            [item for item in scored if item.trajectory.id not in self._greedy],
            sorted(self._scoring.failed_trajectories, key=lambda item: item.trajectory.id),
            self._entry_ids,
            generate_seconds,
            time.perf_counter() - start - generate_seconds,
            [item for item in scored if item.trajectory.id in self._greedy],
            frozenset(self._skipped),
            self._scoring.cured_faults,
            sorted(self._left_out),
            self._generated_tokens,
        )

    def _failures_of(self, recovery: RecoveryConfig | None) -> PromptFailures | None:
        """Return the rule for failures. Without further rounds, no prompt is skipped: no other one would replace it."""
        if recovery is None:
            return None
        if self._further is None:
            return PromptFailures(recovery)
        num_groups = self._further.rounds.num_groups
        return PromptFailures(recovery, num_groups, self._further.skipped_before, self._greedy)

    @property
    def _skipped(self) -> Collection[int]:
        return self._failures.skipped if self._failures else ()

    def _finish_round(self, start: float) -> float:
        """Wait for the expected trajectories and their scores, and replace those that cannot be scored, or skip their prompts.

        Return the seconds from ``start`` until all were generated, without the replacements.
        """
        generated = 0.0
        while True:
            self._wait_for(lambda: self._arrivals.complete)
            generated = generated or time.perf_counter()
            self._wait_for(lambda: self._generation.done() and not self._scoring.batches_in_flight)
            # It may have ended with an error since the last look: weights that had changed at the end of a call.
            self._generation.result()
            if self._failures is not None:
                self._failures.skip()
            failed = [
                key
                for key in self._failed_by_prompt() - self._replaced
                if key[0] not in self._skipped and not self._has_enough(*key)
            ]
            if self._replacement is None or not failed:
                return generated - start
            # One at a time for each prompt, because it takes the next sample index.
            chosen = dict(sorted(failed))
            self._replaced.update(chosen.items())
            indices = {prompt: self._next_sample[prompt] for prompt in chosen}
            self._expect(*self._replacement.generate(indices, {prompt for prompt, greedy in chosen.items() if greedy}))

    def _failed_by_prompt(self) -> Counter[tuple[int, bool]]:
        """Return the number of failed trajectories by prompt index, sampled and greedy ones apart."""
        ids = [item.trajectory.id for item in self._scoring.failed_trajectories]
        return Counter((id.prompt, id in self._greedy) for id in ids)

    def _has_enough(self, prompt: int, greedy: bool) -> bool:
        """Return whether failed trajectories of a prompt need no replacement, because others are left."""
        if greedy or not self._kept_samples:
            return False
        ids = [item.trajectory.id for item in self._scoring.scored]
        return sum(id.prompt == prompt and id not in self._greedy for id in ids) >= self._kept_samples

    def _wake(self, _: object = None) -> None:
        self._events.put(None)

    def _expect(self, batch: GenerationBatch, generation: PendingTrajectories) -> None:
        """Expect the trajectories of another batch of this step."""
        self._generation = generation
        self._greedy |= {request.id for request in batch.requests if request.greedy}
        for id in (request.id for request in batch.requests):
            self._next_sample[id.prompt] = max(self._next_sample[id.prompt], id.sample + 1)
        self._arrivals.expect(batch, self._size, whole_prompts=self._kept_samples > 0)
        generation.add_done_callback(self._wake)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Handle events until the condition holds."""
        while True:
            if self._generation.done():
                self._generation.result()
            for trajectory, reason in self._first.decided():
                # While it was held, its call may have failed.
                if not self._generation.abandoned(trajectory):
                    self._refuse(trajectory, reason) if reason else self._accept(trajectory)
            self._scoring.advance()
            self._on_progress(len(self._scoring.scored))
            if condition():
                return
            if self._has_command is not None and self._has_command():
                raise CommandWaits
            self._handle_events()

    def _handle_events(self) -> None:
        """Wait for at least one event, or for the time of the next attempt to score, and handle all that have occurred."""
        now, quiet = time.monotonic(), None
        if self._generation.done() and not self._arrivals.complete:
            self._quiet_since = self._quiet_since or now
            quiet = max(0.0, self._quiet_since + QUIET_SECONDS - now)
        command = None if self._has_command is None else COMMAND_SECONDS
        times = [seconds for seconds in (self._scoring.seconds_until_retry(), quiet, command) if seconds is not None]
        try:
            event = self._events.get(timeout=min(times, default=None))
        except queue.Empty:
            if quiet is not None and quiet == min(times):
                self._find_lost_deliveries()
            return
        while True:
            if isinstance(event, Exception):
                raise event
            if event is not None:
                self._receive(event)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return

    def _find_lost_deliveries(self) -> None:
        """Read the deliveries that were lost on their way to this process. Redis still counts them as delivered.

        Raises BufferFailed if there are none, although the generation has ended.
        """
        deliveries = [
            item
            for item in self._stream.delivered()
            if item.trajectory.id in self._arrivals.missing and not self._generation.abandoned(item.trajectory)
        ]
        if not deliveries:
            total = self._arrivals.total
            raise BufferFailed(
                f"rollout stream: generation ended with {total - len(self._arrivals.missing)} of {total} trajectories in the "
                "stream"
            )
        self._receive(deliveries)

    def _receive(self, deliveries: Sequence[Delivery]) -> None:
        """Sort deliveries in, and start to score the batches that they complete."""
        self._quiet_since = None
        for delivery in deliveries:
            trajectory = delivery.trajectory
            own = trajectory.id.run == self._run
            if own and trajectory.id.step > self._step:
                self._early.setdefault(trajectory.id.step, []).append(delivery)
                continue
            self._entry_ids.append(delivery.entry_id)
            if own and trajectory.id.step < self._step:
                continue  # A late duplicate of a step that is committed.
            if self._generation.abandoned(trajectory):
                log.debug("trajectory of an abandoned call dropped", id=str(trajectory.id), attempt=trajectory.attempt)
                continue
            if trajectory.id not in self._arrivals.expected:
                raise BufferFailed(
                    f"rollout stream: {trajectory.id} of policy version {trajectory.policy_version} was not requested"
                )
            reason = self._generation.wrong_origin(trajectory) or self._arrivals.wrong(
                trajectory, self._generation.newer_weights()
            )
            if trajectory.outcome is Outcome.LEFT_OUT and not self._kept_samples:
                reason = reason or f"{trajectory.id} was left out, but the step needs all trajectories"
            if reason:
                self._refuse(trajectory, reason)
                continue
            if trajectory.outcome is Outcome.OK:
                self._services.check_experts(trajectory)
            # Tokens of newer weights may build on a key-value cache of former ones, so only the requested are compared.
            if (
                trajectory.outcome is not Outcome.OK
                or not self._arrivals.is_as_requested(trajectory)
                or self._first.admit(trajectory, trajectory.id in self._greedy)
            ):
                self._accept(trajectory)

    def _refuse(self, trajectory: Trajectory, reason: str) -> None:
        """Reject a trajectory, unless another generator has generated it meanwhile."""
        if trajectory.id in self._arrivals.missing:
            if self._turns is not None:
                # The next process would continue after turns of the refused one.
                self._turns.forget_all()
            self._generation.refuse(trajectory, reason)

    def _accept(self, trajectory: Trajectory) -> None:
        """Use a trajectory, and start to score the batch if it completes one. Failed episodes are not scored."""
        if not self._generation.arrived(trajectory):
            return
        self._generated_tokens += len(trajectory.policy_ids)
        batch = self._needed(self._arrivals.add(trajectory))
        for failed in [item for item in batch if item.outcome is not Outcome.OK]:
            self._scoring.reject(failed)
        if batch := [item for item in batch if item.outcome is Outcome.OK]:
            self._scoring.start(self._with_log_probs(batch))

    def _needed(self, batch: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories that the step keeps: of each prompt those that consumed least, and those that failed.

        One that failed after it had consumed more than those which are kept is left out, too: whether its generator ended it
        before it failed depends on time.
        """
        if not self._kept_samples:
            return batch
        finished = defaultdict[int, list[tuple[int, int, int]]](list)
        for item in batch:
            if item.outcome is Outcome.OK and item.id not in self._greedy:
                finished[item.id.prompt].append(item.consumption)
        limits = {
            prompt: sorted(group)[self._kept_samples - 1]
            for prompt, group in finished.items()
            if len(group) >= self._kept_samples
        }
        beyond = {
            item.id
            for item in batch
            if item.outcome is Outcome.LEFT_OUT
            or (
                item.id not in self._greedy
                and (limit := limits.get(item.id.prompt)) is not None
                and item.consumption > limit
            )
        }
        self._left_out += beyond
        return [item for item in batch if item.id not in beyond]

    def _with_log_probs(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Return the trajectories, with log-probs of the policy that sampled if the engine reported none.

        Raises as ``ScoringServices.sampled_log_probs``.
        """
        absent = [
            index for index, item in enumerate(trajectories) if not item.has_log_probs and item.id not in self._greedy
        ]
        if absent:
            lengths = [len(trajectories[index].response_ids) for index in absent]
            log_probs = self._services.sampled_log_probs([trajectories[index] for index in absent])
            parts = np.split(log_probs, np.cumsum(lengths)[:-1])
            for index, part in zip(absent, parts, strict=True):
                trajectories[index] = trajectories[index].with_log_probs(part)
        return trajectories


@dataclass(slots=True)
class _Arrivals:
    """Trajectories that a step expects, and the scoring batches that they form."""

    max_age: int | None = None
    expected: dict[TrajectoryId, tuple[int, bytes]] = field(default_factory=dict)
    """Policy version and digest of each trajectory."""
    missing: set[TrajectoryId] = field(default_factory=set)
    _batches: dict[TrajectoryId, list[TrajectoryId]] = field(default_factory=dict)
    _waiting: dict[TrajectoryId, Trajectory] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def total(self) -> int:
        return len(self.expected)

    def expect(self, batch: GenerationBatch, score_batch_size: int, whole_prompts: bool) -> None:
        """Expect the trajectories of a batch. ``whole_prompts``: no scoring batch has only a part of a prompt's trajectories."""
        ids = sorted(request.id for request in batch.requests)
        self.expected |= dict.fromkeys(ids, (batch.policy_version, batch.weights_digest))
        self.missing |= set(ids)
        group = list[TrajectoryId]()
        for id in ids:
            if len(group) >= score_batch_size and not (whole_prompts and group[-1].prompt == id.prompt):
                group = []
            group.append(id)
            self._batches[id] = group

    def is_as_requested(self, trajectory: Trajectory) -> bool:
        """Return whether the requested weights generated all tokens of an expected trajectory."""
        made_by = (trajectory.policy_version, trajectory.weights_digest)
        return made_by == self.expected[trajectory.id] and not trajectory.version_spans

    def wrong(self, trajectory: Trajectory, newer: Mapping[int, bytes]) -> str:
        """Return why an expected trajectory has other weights than requested, or "".

        ``newer`` are the digests of the policy versions that may generate a trajectory after the requested one.
        """
        version, digest = self.expected[trajectory.id]
        allowed, generator = {**newer, version: digest}, f"generator {trajectory.generator}: "
        where = f"{generator if trajectory.generator else ''}{trajectory.id}"
        last = VersionSpan(trajectory.policy_version, trajectory.weights_digest, len(trajectory.policy_ids))
        for span in (*trajectory.version_spans, last):
            if self.max_age is not None:
                newest = trajectory.id.step - 1
                # A session began with any version. The digests of former ones may not be known any more.
                if not newest - self.max_age <= span.policy_version <= newest:
                    return f"{where} is of policy version {span.policy_version}, expected {newest - self.max_age} to {newest}"
            elif allowed.get(span.policy_version) != span.weights_digest:
                text = f"{where} is of policy version {span.policy_version} and digest {span.weights_digest.hex() or 'none'}"
                since = f" or one of its updates up to version {max(newer)}" if newer else ""
                return f"{text}, requested were version {version} and digest {digest.hex() or 'none'}{since}"
        if self.max_age is not None:
            # Each generator that answers a session may be an update behind the one before it.
            return ""
        versions = [span.policy_version for span in trajectory.version_spans]
        rises = all(part == sorted(set(part)) for part in _versions_of_branches(trajectory))
        if versions and (not rises or max(versions) != trajectory.policy_version):
            return (
                f"{where} is of policy versions {versions} in this order; expected a rising order up to its own version"
                + (" in each branch" if trajectory.further_branches else "")
            )
        return ""

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        """Add a trajectory. Return the batch that it completes, in the order of the ids; or none, also for a duplicate."""
        if trajectory.id not in self.missing:
            return []
        self.missing.remove(trajectory.id)
        self._waiting[trajectory.id] = trajectory
        group = self._batches[trajectory.id]
        if any(id not in self._waiting for id in group):
            return []
        return [self._waiting.pop(id) for id in group]


def _versions_of_branches(trajectory: Trajectory) -> list[list[int]]:
    """Return the policy versions in each branch, in their order. A branch may continue after a later one has begun."""
    spans, start, result = trajectory.version_spans, 0, []
    ends = np.cumsum([span.tokens for span in spans])
    for branch in trajectory.branches:
        end = start + len(branch.policy_ids)
        result.append(
            [
                span.policy_version
                for span, last in zip(spans, ends, strict=True)
                if last - span.tokens < end and last > start
            ]
        )
        start = end
    return result
