"""Episodes: the policy and an environment take turns, until the environment or a limit ends the episode.

The environment answers on other threads, while the engine generates the turns of other trajectories. What an episode contains
depends on its seed, the policy and the environment only, not on the time that an answer takes.

Every turn is recorded before the environment gets it, and the environment's reply before generation continues. An episode with
records of an earlier attempt, of this process or another, continues after them.
"""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import structlog

from quartet.buffer.turn_records import TurnRecords
from quartet.contract.arrays import IntArray
from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.trajectory import (
    Branch,
    EnvironmentReply,
    FinishReason,
    Outcome,
    Segment,
    SegmentRole,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from quartet.contract.turn_record import RecordedTurn
from quartet.engines.engine import TurnSource
from quartet.errors import Cancelled, FailedPrecondition, QuartetError
from quartet.services.generator.recorded_environment import Answer, Environment, RecordedEnvironment, Superseded
from quartet.services.generator.sessions.branching import shared_length
from quartet.services.generator.stragglers import Stragglers

log = structlog.get_logger()

RESET_THREADS, STEP_THREADS = 16, 64
"""Calls of the environment at once. Steps have their own threads, so that resets that wait for a session cannot block them."""
WAIT_SECONDS = 0.2
"""Longest wait for an answer before an engine checks again whether its caller is gone."""


Generate = Callable[[Sequence[GenerationRequest]], Iterator[Trajectory]]
"""Function that generates one turn for each request. It yields each turn as a trajectory whose prompt is all before the turn."""
GenerateTurns = Callable[[Sequence[GenerationRequest], TurnSource], Iterator[Trajectory]]
"""The same for an engine that takes requests while it generates. See ``TurnEngine``."""


@dataclass(slots=True)
class _Episode:
    """A trajectory in progress. ``request`` is that of its last turn. ``attempt`` counts from 1, and so do its ``sessions``.

    ``segments`` are those of the current branch, which was forked from the one before with ``shared_tokens``. ``ended`` are the
    branches before it.
    """

    id: TrajectoryId
    session: str
    attempt: int
    sessions: int
    segments: list[Segment]
    shared_tokens: int = 0
    ended: list[Branch] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    request: GenerationRequest | None = None
    last: RecordedTurn | None = None
    unrecorded: RecordedTurn | None = None
    is_generating: bool = False

    @property
    def consumed(self) -> tuple[int, int]:
        """Tokens of the policy, and turns, so far."""
        return sum(span.tokens for span in self.spans), self.last.index + 1 if self.last else 0

    @property
    def token_ids(self) -> IntArray:
        """All tokens of the current branch so far."""
        return np.concatenate([segment.token_ids for segment in self.segments])

    @property
    def branches(self) -> list[Branch]:
        """All branches so far."""
        parent = len(self.ended) - 1 if self.shared_tokens else -1
        return [*self.ended, Branch(tuple(self.segments), parent, self.shared_tokens)]

    @property
    def prompt(self) -> Segment:
        """The prompt of the data set."""
        return self.branches[0].segments[0]

    def begin_branch(self, prompt: IntArray) -> None:
        """Begin a branch with this prompt, int32 [tokens], which may begin as the current branch does."""
        shared = shared_length(self.token_ids, prompt)
        self.ended = self.branches
        self.segments, self.shared_tokens = [Segment(SegmentRole.PROMPT, prompt)], shared

    def add(self, turn: RecordedTurn) -> None:
        """Add a turn of the policy."""
        self.segments.append(turn.segment)
        whole = VersionSpan(turn.policy_version, turn.weights_digest, len(turn.segment.token_ids))
        self.spans += turn.version_spans or (whole,)
        self.last = turn

    def add_reply(self, reply: EnvironmentReply) -> None:
        """Add the tokens before the next turn."""
        if reply.prompt is not None:
            self.begin_branch(np.asarray(reply.prompt, np.int32))
        elif len(reply.observation):
            self.segments.append(Segment(SegmentRole.OBSERVATION, np.asarray(reply.observation, np.int32)))


@dataclass(frozen=True, slots=True)
class EnvironmentAccess:
    """The environment of a run, and the maximum number of episodes that are open at once.

    More than the engine decodes at once, so that its batch stays full while some wait for the environment. ``max_attempts``
    returns the number of times that an episode may be played, by the outcome of its failure. ``records`` returns the turn records
    of a Generate call; None records nothing.
    """

    environment: Environment
    max_open: int
    max_attempts: Callable[[Outcome], int] = lambda outcome: 1
    records: Callable[[GenerationBatch], TurnRecords] | None = None


class Episodes:
    """The episodes of one Generate call, as a source of turns for an engine. See ``TurnSource``.

    Its methods are called on the thread of the engine; only the calls of the environment run on others.
    """

    def __init__(
        self,
        access: EnvironmentAccess,
        batch: GenerationBatch,
        requests: Sequence[GenerationRequest],
        vocabulary_size: int,
        on_finished: Callable[[Trajectory], None],
        turns: Counter[str] | None = None,
    ) -> None:
        """``requests``: the trajectories, in the order in which to start them.

        ``on_finished`` receives each finished or failed trajectory. ``turns`` counts the turns that are "generated", and those
        that are "recorded" by an earlier attempt. Call ``close`` at the end.
        """
        assert batch.episode is not None
        self._batch, self._settings, self._max_attempts = batch, batch.episode, access.max_attempts
        self._records = access.records(batch) if access.records is not None else None
        self._environment = RecordedEnvironment(access.environment, self._records, batch)
        self._turns: Counter[str] = Counter() if turns is None else turns
        self._vocabulary_size, self._on_finished = vocabulary_size, on_finished
        self._waiting = deque(requests)
        self._greedy = {request.id for request in requests if request.greedy}
        self._stragglers = Stragglers(self._settings.kept_samples)
        self._episodes: dict[TrajectoryId, _Episode] = {}
        self._answers: queue.SimpleQueue[tuple[_Episode, Answer | BaseException]] = queue.SimpleQueue()
        self._pending_calls = 0
        self._resets = ThreadPoolExecutor(RESET_THREADS, "environment-reset")
        self._steps = ThreadPoolExecutor(STEP_THREADS, "environment-step")
        for _ in range(min(access.max_open, len(requests))):
            self._start_next()

    @property
    def open(self) -> bool:
        """True while a trajectory is not finished."""
        return bool(self._episodes)

    def take(self, wait: bool) -> list[GenerationRequest]:
        """See ``TurnSource.take``. Raises the error of a call that is not a failure of the environment."""
        requests = []
        received = self._next_answer(WAIT_SECONDS if wait else None)
        while received is not None:
            request = self._take(*received)
            if request is not None:
                requests.append(request)
            received = self._next_answer(None)
        return requests

    def take_round(self, cancelled: Callable[[], bool]) -> list[GenerationRequest]:
        """Wait for all pending answers. Return the next turns, ordered by id; none if all trajectories are finished.

        Raises Cancelled.
        """
        requests = []
        while self._pending_calls:
            if cancelled():
                raise Cancelled("generation was cancelled by its caller")
            requests += self.take(wait=True)
        return sorted(requests, key=lambda request: request.id)

    def request_of(self, id: TrajectoryId) -> GenerationRequest:
        request = self._episodes[id].request
        assert request is not None
        return request

    def add(self, turn: Trajectory) -> None:
        """Add a generated turn, record it, and give it to the environment."""
        episode = self._episodes[turn.id]
        (segment,) = turn.turns
        index, digest, reason = len(episode.rewards), turn.weights_digest, turn.finish_reason
        generated = RecordedTurn(index, segment, turn.policy_version, digest, reason, turn.version_spans)
        self._turns["generated"] += 1
        episode.add(generated)
        episode.is_generating = False
        if self._is_left_out(episode):
            self._leave_out(episode)
            return
        episode.unrecorded = generated if self._records is not None else None
        self._call(self._steps, episode, lambda: self._step(episode, generated))

    def close(self) -> None:
        """End the open sessions, without waiting for pending calls of the environment. Record the turns that it did not get."""
        for pool in (self._resets, self._steps):
            pool.shutdown(wait=False, cancel_futures=True)
        for episode in self._episodes.values():
            self._environment.end(episode.session)
        if self._records is None:
            return
        self._records.close()
        try:
            for episode in self._episodes.values():
                if (turn := episode.unrecorded) is not None:
                    self._records.append(episode.id, turn)
        except QuartetError as error:  # Not the reason for the end of this generation.
            log.warning("turns not recorded", error=str(error))

    def _start_next(self) -> None:
        """Start the episode of the next waiting request."""
        request = self._waiting.popleft()
        self._start(request.id, Segment(SegmentRole.PROMPT, np.asarray(request.prompt_ids, np.int32)))

    def _start(self, id: TrajectoryId, prompt: Segment, attempt: int = 1, sessions: int = 1) -> None:
        """Start an episode, or continue it after its records, in another session. Every attempt has the same seed."""
        batch = self._batch
        session = f"{id}/{batch.leader_epoch}.{batch.attempt}" + (f".{sessions}" if sessions > 1 else "")
        episode = self._episodes[id] = _Episode(id, session, attempt, sessions, [prompt])
        self._call(self._resets, episode, lambda: self._environment.begin(id, session, prompt.token_ids))

    def _start_again(self, episode: _Episode, attempt: int) -> None:
        self._environment.end(episode.session)
        self._start(episode.id, episode.prompt, attempt, episode.sessions + 1)

    def _step(self, episode: _Episode, turn: RecordedTurn) -> Answer:
        """Record a turn, and give it to the environment. Runs on a thread of steps."""
        self._environment.record(episode.id, turn)
        episode.unrecorded = None
        return Answer(self._environment.step(episode.id, episode.session, turn))

    def _call(self, pool: ThreadPoolExecutor, episode: _Episode, call: Callable[[], Answer]) -> None:
        def work() -> None:
            try:
                self._answers.put((episode, call()))
            except BaseException as error:  # The thread of the engine raises it.
                self._answers.put((episode, error))

        self._pending_calls += 1
        pool.submit(work)

    def _next_answer(self, timeout: float | None) -> tuple[_Episode, Answer | BaseException] | None:
        """Return the next answer, or None if there is none after ``timeout`` seconds."""
        try:
            episode, answer = self._answers.get_nowait() if timeout is None else self._answers.get(timeout=timeout)
        except queue.Empty:
            return None
        self._pending_calls -= 1
        return episode, answer

    def _take(self, episode: _Episode, answer: Answer | BaseException) -> GenerationRequest | None:
        """Return the next turn of an episode, or end it. Raises the error of a call."""
        if self._episodes.get(episode.id) is not episode:
            return None  # It was left out meanwhile, and its session has ended.
        if isinstance(answer, Superseded):
            log.info("episode continues after the records of another process", id=str(episode.id))
            self._start_again(episode, episode.attempt)
            return None
        if isinstance(answer, BaseException):
            raise answer
        record = answer.record
        for turn, reply in zip(record.turns, record.replies, strict=False):
            if turn.index:
                episode.rewards.append(float(reply.reward))
            episode.add_reply(reply)
            episode.add(turn)
        self._turns["recorded"] += len(record.turns)
        return self._continue(episode, answer.reply)

    def _continue(self, episode: _Episode, reply: EnvironmentReply) -> GenerationRequest | None:
        """Return the next turn of an episode, or end it. A failed one starts again, if another attempt is left."""
        if reply.outcome is Outcome.OK and episode.last is not None:
            episode.rewards.append(float(reply.reward))
        if (failure := self._failure(episode, reply)) is not None:
            if episode.attempt < self._max_attempts(failure[0]):
                if reply.outcome is Outcome.OK and self._records is not None:
                    # The recorded reply cannot be used, so another one is needed.
                    self._records.forget([episode.id])
                self._start_again(episode, episode.attempt + 1)
                return None
            episode.rewards = []
            self._end(episode, FinishReason.FAILED, *failure)
            return None
        turns, room = len(episode.rewards), self._room(episode, reply)
        if reply.done or turns == self._settings.max_turns or room < 1:
            self._end(episode, FinishReason.DONE if reply.done else FinishReason.LENGTH)
            return None
        if self._is_left_out(episode):
            self._leave_out(episode)
            return None
        episode.add_reply(reply)
        episode.is_generating = True
        tokens = min(room, self._settings.max_turn_tokens or room)
        episode.request = GenerationRequest(episode.id, episode.token_ids, turns, tokens, episode.id in self._greedy)
        return episode.request

    def _room(self, episode: _Episode, reply: EnvironmentReply) -> int:
        """Return the number of tokens that the next turn may have: no branch is longer than the prompt and the limit."""
        before = len(episode.token_ids) + len(reply.observation) if reply.prompt is None else len(reply.prompt)
        return len(episode.prompt.token_ids) + self._batch.sampling.max_response_tokens - before

    def _failure(self, episode: _Episode, reply: EnvironmentReply) -> tuple[Outcome, str] | None:
        """Return the outcome of a failed or unusable reply with its cause, or None."""
        if reply.outcome is not Outcome.OK:
            return reply.outcome, reply.detail
        turns, size, observation = len(episode.rewards), self._vocabulary_size, reply.observation
        given = observation if reply.prompt is None else reply.prompt
        problem = ""
        if not turns and reply.prompt is not None:
            problem = "its first answer begins another sequence"
        elif not turns and reply.done:
            problem = "it ended the episode before the first turn"
        elif not turns and self._room(episode, reply) < 1:
            limit = self._batch.sampling.max_response_tokens
            problem = f"its first observation has {len(observation)} tokens; expected less than {limit}, the limit of all turns"
        elif len(given) and (given.min() < 0 or given.max() >= size):
            problem = f"its observation after turn {turns} has token ids outside 0..{size - 1}"
        return (Outcome.ENVIRONMENT_ERROR, f"environment: {problem}") if problem else None

    def _is_left_out(self, episode: _Episode) -> bool:
        return episode.id not in self._greedy and self._stragglers.is_left_out(episode.id, *episode.consumed)

    def _leave_out(self, episode: _Episode) -> None:
        """End an episode that the step does not need."""
        episode.rewards = []
        self._end(episode, FinishReason.FAILED, Outcome.LEFT_OUT)

    def _end(self, episode: _Episode, reason: FinishReason, outcome: Outcome = Outcome.OK, detail: str = "") -> None:
        del self._episodes[episode.id]
        self._environment.end(episode.session)
        if self._waiting:
            self._start_next()
        batch, last, spans = self._batch, episode.last, merged_spans(episode.spans)
        first, *further = episode.branches
        trajectory = Trajectory(
            episode.id,
            last.policy_version if last else batch.policy_version,
            first.segments,
            reason,
            last.weights_digest if last else batch.weights_digest,
            batch.generator,
            spans if len(spans) > 1 else (),
            turn_rewards=tuple(episode.rewards),
            outcome=outcome,
            detail=detail,
            further_branches=tuple(further),
        )
        self._on_finished(trajectory)
        if outcome is Outcome.OK and episode.id not in self._greedy:
            self._stragglers.finish(trajectory)
            for other in [each for each in self._episodes.values() if not each.is_generating]:
                if self._is_left_out(other):
                    self._leave_out(other)


def generate_episodes(
    access: EnvironmentAccess | None,
    batch: GenerationBatch,
    requests: Sequence[GenerationRequest],
    vocabulary_size: int,
    generate: Generate,
    generate_turns: GenerateTurns | None,
    on_finished: Callable[[Trajectory], None],
    cancelled: Callable[[], bool],
    turns: Counter[str] | None = None,
) -> None:
    """Generate the episodes of ``batch``, and give each finished or failed trajectory to ``on_finished``.

    ``turns``: see ``Episodes``.

    Without ``generate_turns``, the engine generates a round of turns after the other, each with one turn of every open episode.
    Raises FailedPrecondition without ``access``, the error of the engine, and Cancelled.
    """
    if access is None:
        raise FailedPrecondition(
            "generate: the request has turns with an environment, and this process has none; start it with this run's config"
        )
    ordered = sorted(requests, key=lambda request: request.id)
    episodes = Episodes(access, batch, ordered, vocabulary_size, on_finished, turns)
    try:
        if generate_turns is not None:
            for turn in generate_turns(ordered, episodes):
                episodes.add(turn)
            return
        while requested := episodes.take_round(cancelled):
            for turn in generate(requested):
                episodes.add(turn)
    finally:
        episodes.close()


def merged_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Join neighbouring spans of the same weights."""
    result: list[VersionSpan] = []
    for span in spans:
        last = result[-1] if result else None
        if last is not None and (last.policy_version, last.weights_digest) == (
            span.policy_version,
            span.weights_digest,
        ):
            result[-1] = VersionSpan(last.policy_version, last.weights_digest, last.tokens + span.tokens)
        else:
            result.append(span)
    return tuple(result)
