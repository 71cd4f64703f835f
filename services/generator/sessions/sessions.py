"""The sessions of one Generate call, as a source of turns for an engine.

The thread of the engine only takes requests from a queue and puts turns into another. Everything else runs on the event loop of
the server and on its threads.
"""

from __future__ import annotations

import asyncio
import queue
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quartet.buffer.turn_records import TurnRecords
from quartet.contract.agent import AgentResult, AgentRun, new_session_key
from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.random_streams import environment_seed
from quartet.contract.trajectory import FinishReason, Outcome, Segment, SegmentRole, Trajectory, TrajectoryId
from quartet.errors import Cancelled, QuartetError
from quartet.services.generator.episodes import Generate, GenerateTurns
from quartet.services.generator.sessions.protocol import ProtocolError
from quartet.services.generator.sessions.session import Session, SessionLimits, ended
from quartet.services.generator.sessions.texts import PolicyTexts
from quartet.services.generator.stragglers import Stragglers

if TYPE_CHECKING:  # The HTTP server is loaded only for a run with agents.
    from quartet.services.generator.sessions.app import SessionServer

WAIT_SECONDS = 0.2
"""Longest wait for a request before an engine checks again whether its caller is gone."""
CLOSE_SECONDS = 10.0
"""Longest wait for the end of the sessions of a call."""


class Agents(Protocol):
    """Runs agents. See ``AgentClient``."""

    def start(self, run: AgentRun, on_end: Callable[[AgentResult | QuartetError], None]) -> Callable[[], None]:
        """Start an agent and return at once. ``on_end`` receives its end, on another thread. The result ends the agent."""

    def close(self) -> None:
        """End all agents."""


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """Everything that sessions need of their process.

    ``records`` returns the turn records of a Generate call. ``base_url``: that of the server for agents. ``max_open``: maximum
    number of agents at once. ``max_prompt_tokens``: a branch has room for as many tokens besides
    ``rollout.max_response_tokens``, those after its prompt. ``max_attempts`` returns the number of times that an episode may be
    played, by the outcome of its failure.
    """

    server: SessionServer
    agents: Agents
    texts: PolicyTexts
    records: Callable[[GenerationBatch], TurnRecords]
    base_url: str
    max_open: int
    max_branches: int
    max_tokens: int | None
    max_prompt_tokens: int
    max_sequence_tokens: int
    max_attempts: Callable[[Outcome], int] = lambda outcome: 1

    def close(self) -> None:
        """End the server and all agents."""
        self.server.close()
        self.agents.close()

    def limits(self, batch: GenerationBatch) -> SessionLimits:
        """Return the limits of the episodes of a Generate call."""
        assert batch.episode is not None
        response = batch.sampling.max_response_tokens
        sequence = self.max_prompt_tokens + response
        return SessionLimits(
            batch.episode.max_turns,
            batch.episode.max_turn_tokens,
            response,
            min(sequence, self.max_sequence_tokens or sequence),
            self.max_branches,
            self.max_tokens,
        )

    def longest_requests(
        self, batch: GenerationBatch, requests: Sequence[GenerationRequest]
    ) -> list[GenerationRequest]:
        """Return ``requests`` with the longest possible prompts, by which an engine sizes its buffers."""
        limits = self.limits(batch)
        longest = np.zeros(max(1, limits.max_sequence_tokens - limits.max_response_tokens), np.int32)
        return [replace(request, prompt_ids=longest) for request in requests]


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode in progress. ``attempt`` counts from 1."""

    request: GenerationRequest
    attempt: int = 1
    session: Session | None = None
    key: str = field(default="", repr=False)
    cancel: Callable[[], None] = lambda: None
    turn: asyncio.Future[Trajectory] | None = None


class Sessions:
    """The sessions of one Generate call. See ``TurnSource``.

    Its methods are called on the thread of the engine.
    """

    def __init__(
        self,
        access: AgentAccess,
        batch: GenerationBatch,
        requests: Sequence[GenerationRequest],
        on_finished: Callable[[Trajectory], None],
        turns: Counter[str],
    ) -> None:
        """``requests``: the trajectories, in the order in which to start their agents.

        ``on_finished`` receives each finished or failed trajectory. ``turns`` counts the turns, "generated" and "recorded". Call
        ``close`` at the end.
        """
        assert batch.episode is not None
        self._access, self._batch, self._on_finished = access, batch, on_finished
        self._records = access.records(batch)
        self._limits, self._fields = access.limits(batch), batch.episode.fields
        self._stragglers = Stragglers(batch.episode.kept_samples)
        self._loop = access.server.loop
        self._requests: dict[TrajectoryId, GenerationRequest] = {}
        # What the event loop has for the thread of the engine: turns to generate, finished trajectories, errors.
        self._items: queue.SimpleQueue[GenerationRequest | Trajectory | BaseException] = queue.SimpleQueue()
        self._waiting = deque(requests)
        self._open = 0
        self._episodes: dict[TrajectoryId, _Episode] = {}
        self._is_closed = False
        self._turns = turns
        for _ in range(min(access.max_open, len(requests))):
            self._start_next()

    @property
    def open(self) -> bool:
        """True while a trajectory is not finished."""
        return self._open > 0

    def take(self, wait: bool) -> list[GenerationRequest]:
        """See ``TurnSource.take``. Raises an error that is no fault of an agent."""
        requests = []
        item = self._next_item(WAIT_SECONDS if wait else None)
        while item is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, GenerationRequest):
                self._requests[item.id] = item
                requests.append(item)
            else:
                self._open -= 1
                if self._waiting:
                    self._start_next()
                self._on_finished(item)
            item = self._next_item(None)
        return requests

    def request_of(self, id: TrajectoryId) -> GenerationRequest:
        return self._requests[id]

    def add(self, turn: Trajectory) -> None:
        """Give a generated turn to its session."""
        self._loop.call_soon_threadsafe(self._set_turn, turn)

    def close(self) -> None:
        """End the open sessions and their agents."""
        self._records.close()
        future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        # Many records may wait for a server that is down.
        with suppress(TimeoutError):
            future.result(CLOSE_SECONDS)

    def _start_next(self) -> None:
        self._open += 1
        episode = _Episode(self._waiting.popleft())
        self._loop.call_soon_threadsafe(self._run, self._start(episode))

    def _next_item(self, timeout: float | None) -> GenerationRequest | Trajectory | BaseException | None:
        try:
            return self._items.get_nowait() if timeout is None else self._items.get(timeout=timeout)
        except queue.Empty:
            return None

    # What follows runs on the event loop.

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine. Its error ends the Generate call."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._items.put(error)

        self._access.server.spawn(guarded())

    async def _start(self, episode: _Episode) -> None:
        """Start an attempt of an episode, with a key of its own."""
        if self._is_closed:
            return
        access, batch, id = self._access, self._batch, episode.request.id
        session = Session(
            id,
            batch.run,
            self._limits,
            batch.sampling,
            episode.request.greedy,
            access.texts,
            self._records,
            access.server.threads,
            lambda request: self._generate(episode, request),
            self._items.put,
            self._turns,
        )
        self._episodes[id] = episode
        await session.load()
        if self._is_closed or id not in self._episodes:  # It was left out meanwhile.
            return
        episode.session, episode.key = session, new_session_key()
        access.server.register(episode.key, session)
        name = f"{id}/{batch.leader_epoch}.{batch.attempt}"
        run = AgentRun(
            session=name if episode.attempt == 1 else f"{name}.{episode.attempt}",
            seed=environment_seed(batch.seed, id),
            fields=self._fields.get(id.prompt, "{}"),
            base_url=access.base_url,
            api_key=episode.key,
            model=batch.run,
        )

        def on_end(result: AgentResult | QuartetError) -> None:
            self._loop.call_soon_threadsafe(self._run, self._end(episode, session, result))

        episode.cancel = access.agents.start(run, on_end)

    def _generate(self, episode: _Episode, request: GenerationRequest) -> asyncio.Future[Trajectory]:
        """Give a request to the thread of the engine."""
        self._leave_out([episode])
        episode.turn = self._loop.create_future()
        if self._is_closed or episode.session is None:
            episode.turn.set_exception(_stopped() if self._is_closed else ended())
        else:
            self._items.put(request)
        return episode.turn

    def _set_turn(self, turn: Trajectory) -> None:
        episode = self._episodes.get(turn.id)
        if episode is not None and episode.turn is not None and not episode.turn.done():
            episode.turn.set_result(turn)

    async def _end(self, episode: _Episode, session: Session, result: AgentResult | QuartetError) -> None:
        """End an attempt with the result of its agent: finish the trajectory, or start another attempt."""
        if self._is_closed or episode.session is not session:
            return
        self._access.server.unregister(episode.key)
        if isinstance(result, QuartetError):
            raise result
        trajectory = await session.result(result.reward, self._batch.generator)
        if self._is_closed or episode.session is not session:  # It was left out meanwhile.
            return
        outcome, detail = result.outcome, result.detail
        if outcome is Outcome.OK and trajectory is None:
            outcome, detail = Outcome.ENVIRONMENT_ERROR, "agent: ended without an answer of the policy"
        if outcome is Outcome.ENVIRONMENT_ERROR and session.limit:
            detail += f"; it had got the error {session.limit} of a limit, at which it should end with its result"
        if outcome is not Outcome.OK:
            if result.lost or episode.attempt < self._access.max_attempts(outcome):
                episode.attempt += not result.lost
                await self._start(episode)
                return
            trajectory = self._failed(episode, trajectory, outcome, detail)
        assert trajectory is not None
        self._finish(episode, replace(trajectory, logged=result.logged))
        if trajectory.outcome is Outcome.OK and not episode.request.greedy:
            self._stragglers.finish(trajectory)
            self._leave_out([*self._episodes.values()])

    def _leave_out(self, episodes: Sequence[_Episode]) -> None:
        """End those of the open episodes that the step does not need any more."""
        for episode in episodes:
            session, id = episode.session, episode.request.id
            if session is None or episode.request.greedy or not self._stragglers.is_left_out(id, *session.consumed):
                continue
            self._access.server.unregister(episode.key)
            session.refuse()
            # The end of its agent is ignored from now on, and so is a turn that is being generated.
            episode.session = None
            if episode.turn is not None and not episode.turn.done():
                episode.turn.set_exception(ended())
            episode.cancel()
            self._finish(episode, self._failed(episode, None, Outcome.LEFT_OUT, ""))

    def _finish(self, episode: _Episode, trajectory: Trajectory) -> None:
        del self._episodes[trajectory.id]
        self._items.put(trajectory)

    def _failed(self, episode: _Episode, trajectory: Trajectory | None, outcome: Outcome, detail: str) -> Trajectory:
        batch, request = self._batch, episode.request
        if trajectory is None:
            prompt = Segment(SegmentRole.PROMPT, np.asarray(request.prompt_ids, np.int32))
            trajectory = Trajectory(
                request.id, batch.policy_version, (prompt,), FinishReason.FAILED, batch.weights_digest, batch.generator
            )
        return replace(trajectory, finish_reason=FinishReason.FAILED, outcome=outcome, detail=detail, turn_rewards=())

    async def _close(self) -> None:
        self._is_closed = True
        for episode in self._episodes.values():
            if episode.key:
                self._access.server.unregister(episode.key)
            if episode.session is not None:
                episode.session.refuse()
            if episode.turn is not None and not episode.turn.done():
                episode.turn.set_exception(_stopped())
            episode.cancel()
        # The next call generates a turn again whose record it does not see.
        await asyncio.gather(*(each.session.settled() for each in self._episodes.values() if each.session is not None))


def _stopped() -> ProtocolError:
    return ProtocolError(503, "The generation has stopped and is repeated; end this agent.", "stopped")


def generate_sessions(
    access: AgentAccess,
    batch: GenerationBatch,
    requests: Sequence[GenerationRequest],
    generate: Generate,
    generate_turns: GenerateTurns | None,
    on_finished: Callable[[Trajectory], None],
    cancelled: Callable[[], bool],
    turns: Counter[str],
) -> None:
    """Generate the episodes of ``batch`` for agents.

    Each finished or failed trajectory is given to ``on_finished``. Without ``generate_turns``, the engine generates the requests
    that have arrived, then those that have arrived meanwhile. ``turns`` counts the turns, "generated" and "recorded". Raises the
    error of the engine or of the records, and Cancelled.
    """
    ordered = sorted(requests, key=lambda request: request.id)
    sessions = Sessions(access, batch, ordered, on_finished, turns)
    try:
        if generate_turns is not None:
            for turn in generate_turns(access.longest_requests(batch, ordered), sessions):
                sessions.add(turn)
            return
        while sessions.open:
            if cancelled():
                raise Cancelled("generation was cancelled by its caller")
            for turn in generate(sorted(sessions.take(wait=True), key=lambda request: request.id)):
                sessions.add(turn)
    finally:
        sessions.close()
