"""Traffic: sessions of users, from their first request to the trajectories that they become.

A session is in Redis, request by request, so any process that generates can continue it. This module keeps those that were used
last in memory. One that is not there, or that another process has continued, is built again: its requests are repeated, and the
recorded turns answer them. A trajectory is built in the same way, so it does not depend on the process that builds it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import queue
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from pydantic_core import from_json

from quartet.buffer.traffic import (
    SessionInfo,
    SessionRequest,
    SessionState,
    TrafficStore,
    digest_of,
    logged_of,
    new_period,
    packed,
)
from quartet.config.agent import AgentConfig
from quartet.config.section import MAX_SETTING
from quartet.config.traffic import TrafficConfig
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.logged_values import cleaned
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.contract.turn_record import EpisodeRecord, RecordedTurn
from quartet.errors import BufferFailed, FailedPrecondition, QuartetError, ServiceUnavailable
from quartet.services.generator.sessions.protocol import (
    CHAT_PATH,
    Call,
    ProtocolError,
    invalid,
    parse_chat,
    parse_completion,
)
from quartet.services.generator.sessions.responses import Header
from quartet.services.generator.sessions.session import Answer, Session, SessionLimits
from quartet.services.generator.sessions.texts import PolicyTexts

if TYPE_CHECKING:  # The HTTP server is loaded only for a run with requests of agents or users.
    from quartet.services.generator.sessions.app import SessionServer

log = structlog.get_logger()

MAX_LOADED = 1000
"""Sessions in memory. Those that were used last stay."""
MAX_SESSION_BYTES = 4 * 1024 * 1024
"""Size of the stored requests of a session, compressed, after which it takes no further one."""
MAX_ID_CHARACTERS = 128
"""Length of the id of a session."""
IDLE_SECONDS, MAX_SERVING_SECONDS = 0.5, 60.0
"""Time without a request after which a serving ends, and time after which it takes no more."""
ATTEST_SECONDS = 1.0
"""Time after which a serving reads the weights back, as soon as a turn is complete."""
TAKE_SECONDS = 60.0
"""Longest wait until a trajectory is built from its session."""


class Access(StrEnum):
    """What a key allows: viewers send requests to the policy, operators also give rewards and look at sessions."""

    VIEWER = "viewer"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    """The sender of a request. ``owner``: digest of the key, which sessions of the user carry."""

    access: Access
    owner: str


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A turn that a session waits for."""

    request: GenerationRequest
    future: asyncio.Future[Answered]


@dataclass(slots=True, eq=False)
class Period:
    """The time between two looks at the weights of an engine. A turn belongs to the period in which it was completed.

    ``sessions``: those that have recorded such a turn and do not know the outcome. ``is_attested``: whether the weights were
    those of their digest; None before the end.
    """

    name: str = field(default_factory=new_period)
    sessions: set[str] = field(default_factory=set)
    is_attested: bool | None = None


Answered = tuple[Trajectory, Period]
"""A turn and its period."""


class TrafficTurns:
    """Turns that users wait for, as a source for an engine. See ``TurnSource``. Thread-safe."""

    def __init__(self) -> None:
        self.period = Period()
        """The present period, for the thread of the engine."""
        self._queue: queue.SimpleQueue[GenerationRequest] = queue.SimpleQueue()
        self._waiting: dict[TrajectoryId, _Waiting] = {}
        self._lock = threading.Lock()
        self._closed: QuartetError | None = None
        self._first: GenerationRequest | None = None
        self._stops: Callable[[], bool] = lambda: False
        self._idle_since = 0.0

    def put(self, request: GenerationRequest) -> asyncio.Future[Answered]:
        """Ask for a turn of a session. Call it on the event loop of the result."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed is not None:
                future.set_exception(self._closed)
                return future
            self._waiting[request.id] = _Waiting(request, future)
            self._queue.put(request)
        return future

    def wait(self, seconds: float) -> bool:
        """Wait for a turn that no engine generates yet. Return whether there is one. For the thread that starts engines."""
        if self._first is None:
            with suppress(queue.Empty):
                self._first = self._queue.get(timeout=seconds)
        return self._first is not None

    def begin(self, stops: Callable[[], bool]) -> None:
        """Begin to serve, until no turn has come for a while, or until ``stops``. Turns that have begun are finished."""
        self._stops, self._idle_since = stops, time.monotonic()

    @property
    def open(self) -> bool:
        if self._stops():
            return False
        return self._first is not None or not self._queue.empty() or time.monotonic() < self._idle_since + IDLE_SECONDS

    def take(self, wait: bool) -> list[GenerationRequest]:
        if self._stops():
            return []
        first, self._first = self._first, None
        requests = [] if first is None else [first]
        with suppress(queue.Empty):
            if wait and first is None:
                requests.append(self._queue.get(timeout=IDLE_SECONDS / 5))
            while True:
                requests.append(self._queue.get_nowait())
        if requests:
            self._idle_since = time.monotonic()
        return requests

    def request_of(self, id: TrajectoryId) -> GenerationRequest:
        return self._waiting[id].request

    def finish(self, turn: Trajectory) -> None:
        """Give a turn to its session."""
        self._idle_since = time.monotonic()
        waiting = self._waiting.pop(turn.id)
        waiting.future.get_loop().call_soon_threadsafe(_set_result, waiting.future, (turn, self.period))

    def end_period(self, attested: bool) -> Period:
        """End the present period, and return it."""
        ended, self.period = self.period, Period()
        ended.is_attested = attested
        return ended

    def close(self, error: QuartetError) -> None:
        """Give an error to all sessions that wait for a turn, and to those that ask for one from now on."""
        self._closed = error
        self.fail(error)

    def fail(self, error: QuartetError) -> None:
        """Give an error to all sessions that wait for a turn."""
        with self._lock:
            self._first = None
            with suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            failed, self._waiting = [*self._waiting.values()], {}
        for each in failed:
            each.future.get_loop().call_soon_threadsafe(_set_error, each.future, error)


class TrafficSessions:
    """The sessions of users. The event loop of ``server`` calls what is ``async``, other threads the rest."""

    records = None

    def __init__(
        self,
        server: SessionServer,
        store: TrafficStore,
        texts: PolicyTexts,
        keys: Mapping[str, Access],
        config: TrafficConfig,
        run: str,
        seed: int,
        limits: SessionLimits,
        sampling: SamplingParameters,
        max_age: int,
        max_concurrent: int,
        max_wait: float,
    ) -> None:
        """``max_age``: updates of the policy since the oldest token of a session, at most, if a step trains on it.

        ``max_concurrent``: number of turns that the engine generates at once. ``max_wait``: seconds for which a call waits for
        sessions until it is repeated.
        """
        self._server, self._store, self._texts, self._config, self._run = server, store, texts, config, run
        self._keys = {hashlib.sha256(key.encode()).digest(): access for key, access in keys.items()}
        self._limits, self.sampling, self.seed = limits, sampling, seed
        self._max_age, self._max_concurrent, self.max_wait = max_age, max_concurrent, max_wait
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._rate = RateLimitItemPerMinute(config.requests_per_minute)
        self._loaded: OrderedDict[str, _TrafficSession] = OrderedDict()
        self._loading: dict[str, asyncio.Task[_TrafficSession]] = {}
        self.turns = TrafficTurns()
        # Periods that have ended, of which sessions have to be told.
        self._ended: deque[Period] = deque()
        self._telling = threading.Lock()
        self.counts: Counter[str] = Counter()
        server.admit_users(self)

    @property
    def model(self) -> str:
        """Name of the policy for requests."""
        return self._run

    def base_url(self, agent: AgentConfig, encrypted: bool) -> str:
        """Return the URL for clients on this machine, or the one that is advertised."""
        return agent.base_url(self._server.address, encrypted)

    def close(self) -> None:
        """End the server."""
        self.tell_sessions()
        self._server.close()

    def user(self, key: str) -> User:
        """Return the sender with this key. Raises ProtocolError, also if there were too many requests with it."""
        digest = hashlib.sha256(key.encode(errors="replace")).digest()
        access = next((access for known, access in self._keys.items() if hmac.compare_digest(known, digest)), None)
        if access is None:
            raise ProtocolError(401, "Wrong API key. Send a key of this deployment.", "invalid_api_key")
        owner = digest.hex()[:32]
        if not self._limiter.hit(self._rate, owner):
            left = max(1, round(self._limiter.get_window_stats(self._rate, owner).reset_time - time.time()))
            raise ProtocolError(
                429,
                f"More than {self._config.requests_per_minute} requests in a minute; send the next one in {left} s.",
                "rate_limit_exceeded",
                headers={"retry-after": str(left)},
            )
        return User(access, owner)

    async def session(self, user: User, ids: Sequence[str], call: Call) -> Session:
        """Return the session of a request. ``ids``: those that it gives; none for a new one. Raises ProtocolError."""
        if len(ids) > 1:
            raise invalid(f"X-Session-Id: expected one header, not {len(ids)}; a request belongs to one session")
        given = next(iter(ids), None)
        if given is not None and not _is_id(given):
            raise invalid(
                f"X-Session-Id: expected 1 to {MAX_ID_CHARACTERS} letters, digits and any of . _ : - (such as a UUID)"
            )
        if not call.store:
            return await self._without_record(given or "")
        id = given or uuid.uuid4().hex
        info = await self._on_thread(self._store.info, id)
        if info is None:
            unrewarded = await self._on_thread(self._store.count_open)
            rewarded = await self._on_thread(self._store.count_rewarded)
            if unrewarded + rewarded >= self._config.max_sessions:
                raise ProtocolError(
                    429,
                    f"{unrewarded} sessions wait for a reward and {rewarded} for a step, which is the limit "
                    "(environment.traffic.max_sessions). Give rewards, delete sessions, or send store false.",
                    "rate_limit_exceeded",
                    headers={"retry-after": "60"},
                )
            # Its first turn opens it, so a request that is refused leaves nothing.
            info = SessionInfo(id, SessionState.OPEN, await self._on_thread(self._store.new_number), user.owner)
        if info.state is not SessionState.OPEN:
            raise _has_ended(info)
        if info.owner != user.owner:
            raise _in_use()
        session = await self._loaded_session(info)
        if session.info.owner != user.owner:
            raise _in_use()
        return session

    async def info(self, user: User, id: str) -> dict[str, Any]:
        """Return a session for an operator. Raises ProtocolError."""
        self._check_operator(user, "looks at sessions")
        return _shown(await self._on_thread(self._store.info, id), id)

    async def delete(self, user: User, id: str) -> dict[str, Any]:
        """Delete what a session has, for an operator. Raises ProtocolError."""
        self._check_operator(user, "deletes sessions")
        info = await self._on_thread(self._store.delete, id)
        self._forget(id)
        if info is not None and info.state in (SessionState.TAKEN, SessionState.TRAINED):
            raise ProtocolError(
                409, f"Session {id}: step {info.step} trains on it already; it was not deleted.", "session_ended"
            )
        return _shown(info, id)

    async def give_reward(self, user: User, id: str, body: bytes) -> dict[str, Any]:
        """End a session with a reward, from a body of JSON. Raises ProtocolError."""
        self._check_operator(user, "gives rewards")
        reward, logged = _reward(body)
        info = await self._on_thread(self._store.give_reward, id, reward, logged)
        self._forget(id)
        if info is None:
            return _shown(None, id)
        if info.state is SessionState.OPEN:
            raise ProtocolError(
                409, f"Session {id}: has no answer yet, so there is nothing to reward.", "session_empty"
            )
        if info.reward is None:
            raise _has_ended(info)
        # A session of an earlier version has no digest.
        if info.reward != reward or info.logged_digest not in ("", digest_of(logged)):
            raise ProtocolError(
                409,
                f"Session {id}: has the reward {info.reward:g} already"
                f"{', with another logged' if info.reward == reward else ''}; a session has one reward.",
                "session_ended",
            )
        return _shown(info, id)

    def take(self, id: TrajectoryId) -> Trajectory | None:
        """Return a trajectory, from the session that it has or the next one with a reward. None if there is none yet.

        Sessions whose tokens are too old are ended, and so are those that cannot be built again. Raises ServiceUnavailable,
        BufferFailed.
        """
        while (name := self._store.take(id)) is not None:
            trajectory, state = self._built(name), SessionState.UNUSABLE
            if trajectory is not None:
                versions = [span.policy_version for span in trajectory.version_spans] or [trajectory.policy_version]
                if id.step - 1 - self._max_age <= min(versions) and max(versions) < id.step:
                    return replace(trajectory, id=id)
                state = SessionState.STALE
            log.warning("session not trained", session=name, state=str(state), step=id.step)
            self._store.drop(id, name, state)
        return None

    def expire(self) -> None:
        """End the sessions whose time is over, and those that nothing will attest."""
        self.tell_sessions()
        self._store.expire()
        self._store.end_lost_periods()

    def end_period(self, attested: bool) -> None:
        """End the present period: its sessions can be trained if its weights were attested. For the thread of the engine."""
        self._tell_later(self.turns.end_period(attested))

    def tell_sessions(self) -> None:
        """Tell the sessions of ended periods the outcome. What Redis does not take now is told later. Any thread may call it."""
        while self._ended and self._telling.acquire(blocking=False):
            try:
                self._tell(self._ended[0])
                self._ended.popleft()
            except QuartetError as error:
                log.warning("outcome of an attestation not recorded yet", error=str(error))
                return
            finally:
                self._telling.release()

    def _tell(self, period: Period) -> None:
        for id in [*period.sessions]:
            self._store.end_period(id, period.name, period.is_attested is True)
            period.sessions.discard(id)

    def responses(self) -> Mapping[str, int]:
        """Return the number of responses by class of their status."""
        return dict(self._server.responses)

    def waiting(self) -> Mapping[str, int]:
        """Return the number of sessions of the run that wait, by state. Raises ServiceUnavailable."""
        counts = {SessionState.OPEN: self._store.count_open(), SessionState.REWARDED: self._store.count_rewarded()}
        return {str(state): count for state, count in counts.items()}

    def recorded(self, session: str, period: Period) -> None:
        """Take note that a session has recorded a turn. Its period may have ended since the turn was complete."""
        period.sessions.add(session)
        if period.is_attested is not None:
            self._tell_later(period)

    def _tell_later(self, period: Period) -> None:
        self._ended.append(period)
        with suppress(RuntimeError):  # The process ends, see ``close``.
            self._server.threads.submit(self.tell_sessions)

    def longest_requests(self) -> list[GenerationRequest]:
        """Return requests with the longest possible prompts, by which an engine sizes its buffers."""
        limits = self._limits
        longest = np.zeros(max(1, limits.max_sequence_tokens - limits.max_response_tokens), np.int32)
        ids = (TrajectoryId(self._run, 0, number, 0) for number in range(self._max_concurrent))
        return [GenerationRequest(id, longest) for id in ids]

    def _built(self, id: str) -> Trajectory | None:
        """Return the trajectory of a session that has ended, None if it cannot be built."""
        try:
            future = asyncio.run_coroutine_threadsafe(self._build(id), self._server.loop)
            return future.result(TAKE_SECONDS)
        except (ServiceUnavailable, BufferFailed, TimeoutError):
            raise
        except Exception as error:
            log.error("session cannot be built again", session=id, error=f"{type(error).__name__}: {error}")
            return None

    async def _build(self, id: str) -> Trajectory | None:
        run = asyncio.get_running_loop().run_in_executor
        info = await run(self._server.threads, self._store.info, id)
        if info is None or info.reward is None or await run(self._server.threads, self._store.is_spoiled, id):
            return None
        session = self._new_session(info)
        await session.repeat()
        trajectory = await session.result(info.reward, "")
        logged = logged_of(await run(self._server.threads, self._store.logged, id))
        return None if trajectory is None else replace(trajectory, logged={**logged, "session": id})

    async def _loaded_session(self, info: SessionInfo) -> _TrafficSession:
        known = self._loaded.get(info.id)
        # While it answers, it may be ahead of what was read. Otherwise another process has continued the session.
        is_current = known is not None and (known.num_requests >= info.requests or known.is_answering)
        # A session without an answer belongs to no one.
        is_owned = known is not None and (known.num_requests > 0 or known.is_busy or known.info.owner == info.owner)
        if known is not None and not known.is_outdated and is_current and is_owned:
            self._loaded.move_to_end(info.id)
            return known
        if (task := self._loading.get(info.id)) is None:
            task = self._server.loop.create_task(self._load(info))
            self._loading[info.id] = task
            task.add_done_callback(lambda _: self._loading.pop(info.id, None))
        return await asyncio.shield(task)

    async def _load(self, info: SessionInfo) -> _TrafficSession:
        session = self._new_session(info)
        if (known := self._loaded.get(info.id)) is not None:
            await known.settle()
            session.refused = known.refused
        try:
            await session.repeat()
        except (ServiceUnavailable, BufferFailed) as error:
            log.error("the buffer failed", error=str(error))
            raise _unavailable() from error
        except QuartetError as error:
            log.error("session cannot be continued", session=info.id, error=str(error))
            raise ProtocolError(
                409, f"Session {info.id}: cannot be continued; begin another one.", "session_ended"
            ) from error
        self._loaded[info.id] = session
        for id in [id for id, each in self._loaded.items() if not each.is_busy][
            : max(0, len(self._loaded) - MAX_LOADED)
        ]:
            del self._loaded[id]
        return session

    def _forget(self, id: str) -> None:
        if (session := self._loaded.pop(id, None)) is not None:
            session.refuse()

    def _new_session(self, info: SessionInfo) -> _TrafficSession:
        records = _SessionRecords(self, self._store, info, self._config.session_seconds)
        return _TrafficSession(info, self, records, self._store, self._config.session_seconds)

    async def _without_record(self, shown: str) -> Session:
        """Return a session for one request that is not trained."""
        number = await self._on_thread(self._store.new_number)
        return _UserSession(SessionInfo(shown, SessionState.OPEN, number), self, _NoRecords())

    def session_arguments(self, number: int) -> dict[str, Any]:
        """Return what every session is created with. ``number`` names its random streams, which no trajectory of a step has."""
        return {
            "id": TrajectoryId(self._run, 0, number, 0),
            "model": self._run,
            "limits": self._limits,
            "sampling": self.sampling,
            "greedy": False,
            "texts": self._texts,
            "threads": self._server.threads,
            "counts": self.counts,
        }

    def generate(self, request: GenerationRequest) -> asyncio.Future[Answered]:
        """Ask for a turn of a session."""
        return self.turns.put(request)

    def run(self, work: Any) -> None:
        """Run a coroutine to its end."""
        self._server.spawn(work)

    async def _on_thread(self, work: Callable[..., Any], *arguments: object) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._server.threads, work, *arguments)
        except QuartetError as error:
            log.error("the buffer failed", error=str(error))
            raise _unavailable() from error

    def _check_operator(self, user: User, what: str) -> None:
        if user.access is not Access.OPERATOR:
            raise ProtocolError(403, f"Only the key of an operator {what}.", "permission_denied")


class _UserSession(Session):
    """Requests of one session of a user."""

    _whole = "a session"

    def __init__(self, info: SessionInfo, traffic: TrafficSessions, records: _SessionRecords | _NoRecords) -> None:
        super().__init__(
            **traffic.session_arguments(info.number),
            records=records,
            generate=self._ask,
            on_failure=lambda error: log.error("answer failed", session=info.id, error=str(error)),
        )
        self.info, self._traffic, self._user_records = info, traffic, records

    async def _ask(self, request: GenerationRequest) -> Trajectory:
        """Ask for a turn."""
        turn, self._user_records.period = await self._traffic.generate(request)
        return turn

    def header(self, answer: Answer) -> Header:
        return replace(super().header(answer), session=self.info.id)

    def _failed(self) -> ProtocolError:
        return _unavailable()

    def _over(self) -> ProtocolError:
        return ProtocolError(
            409,
            f"Session {self.info.id}: has ended while this request waited; begin another one.",
            "session_ended",
            "X-Session-Id",
        )


class _TrafficSession(_UserSession):
    """A session that is recorded. ``num_requests``: those with an answer."""

    def __init__(
        self,
        info: SessionInfo,
        traffic: TrafficSessions,
        records: _SessionRecords,
        store: TrafficStore,
        seconds: float,
    ) -> None:
        super().__init__(info, traffic, records)
        self._store, self._seconds = store, seconds
        self._numbers: dict[Answer, int] = {}
        self.num_requests = 0
        self._stored_bytes = 0
        self.is_outdated = self._is_repeating = False

    @property
    def is_busy(self) -> bool:
        """True while a client waits for an answer."""
        waits = any(answer.waiting for answers in self._answers.values() for answer in answers)
        return waits or self.is_answering

    async def repeat(self) -> None:
        """Repeat the recorded requests, which the recorded turns answer. Raises FailedPrecondition if one has none."""
        requests, record = await self._on_thread(self._store.load, self.info.id)
        self._is_repeating = True
        for number, request in enumerate(requests):
            self._stored_bytes += await self._on_thread(lambda request=request: len(packed(request)))
            parse = parse_chat if request.path == CHAT_PATH else parse_completion
            _, call = await self._on_thread(parse, request.body)
            self.use_records(EpisodeRecord(tuple(record.turns[index] for index in request.turns)))
            answer = self.answer(call, False, request.key or None)
            try:
                assert answer.task is not None
                await answer.task
            except ProtocolError as error:
                raise FailedPrecondition(f"request {number} is refused now: {error}") from None
            self.set_delivered(answer, request.delivered)
            self.release(answer)
        # Turns of requests whose answers could not be recorded. An equal request gets them.
        used = {index for request in requests for index in request.turns}
        self.use_records(EpisodeRecord(tuple(turn for turn in record.turns if turn.index not in used)))
        self._next_index = len(record.turns)
        self._is_repeating = False

    async def deliver(self, answer: Answer, delivered: bool) -> None:
        number = self._numbers.get(answer)
        # An answer is recorded as not delivered first.
        if number is not None and delivered and not answer.delivered:
            await self._on_thread(self._store.set_delivered, self.info.id, number, delivered)
        self.set_delivered(answer, delivered)

    async def settle(self) -> None:
        """Take no further requests, and wait for the one that is answered."""
        self.is_outdated = True
        async with self._lock:
            pass

    @property
    def is_answering(self) -> bool:
        """True while a request is answered."""
        return self._lock.locked()

    def _failed(self) -> ProtocolError:
        # What is recorded is not known.
        self.is_outdated = True
        return super()._failed()

    async def _complete_choices(self, answer: Answer, call: Call) -> None:
        if self.is_outdated:
            raise self._outdated()
        if self._stored_bytes > MAX_SESSION_BYTES and not self._is_repeating:
            raise invalid(
                f"Session {self.info.id}: its requests have more than {MAX_SESSION_BYTES} bytes; begin another one.",
                code="session_too_large",
            )
        await super()._complete_choices(answer, call)
        number = self.num_requests
        if not self._is_repeating:
            turns = tuple(turn.record.index for turn in answer.turns)
            key = next((key for key, other in self._answer_of_key.items() if other is answer), "")
            request = SessionRequest(call.path, call.body, turns, delivered=False, key=key)
            self._stored_bytes += len(packed(request))
            done = await self._on_thread(self._store.append_request, self.info.id, number, request, self._seconds)
            if not done:
                raise self._outdated()
        self._numbers[answer], self.num_requests = number, number + 1

    async def _ask(self, request: GenerationRequest) -> Trajectory:
        if self._is_repeating:
            raise FailedPrecondition("a request has no recorded turn")
        return await super()._ask(request)

    def _record(self, *arguments: Any) -> RecordedTurn:
        try:
            return super()._record(*arguments)
        except FailedPrecondition:
            raise self._outdated() from None

    def _outdated(self) -> ProtocolError:
        self.is_outdated = True
        return ProtocolError(
            409,
            f"Session {self.info.id}: was continued or ended by another request at the same time; send this one again.",
            "session_conflict",
        )


class _SessionRecords:
    """The recorded turns of one session. See ``Records``. ``period``: that of the turn which comes next."""

    def __init__(self, traffic: TrafficSessions, store: TrafficStore, session: SessionInfo, seconds: float) -> None:
        self._traffic, self._store, self._session, self._seconds = traffic, store, session, seconds
        self.period = Period()

    def load(self, _: TrajectoryId) -> EpisodeRecord:
        return self._store.load(self._session.id)[1]

    def append(self, _: TrajectoryId, turn: RecordedTurn) -> bool:
        try:
            return self._store.append_turn(self._session, turn, self._seconds, self.period.name)
        finally:
            # Also after an error: the turn may be recorded, and the answer of Redis lost.
            self._traffic.recorded(self._session.id, self.period)

    def forget(self, _: Any) -> None:
        """Do nothing: the store ends sessions."""

    def close(self) -> None:
        """Do nothing."""


class _NoRecords:
    """Records of a request that is not trained. See ``Records``."""

    period: Period | None = None

    def load(self, _: TrajectoryId) -> EpisodeRecord:
        return EpisodeRecord()

    def append(self, _: TrajectoryId, __: RecordedTurn) -> bool:
        return True

    def forget(self, _: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def _set_result(future: asyncio.Future[Answered], answered: Answered) -> None:
    if not future.done():
        future.set_result(answered)


def _set_error(future: asyncio.Future[Answered], error: QuartetError) -> None:
    if not future.done():
        future.set_exception(error)


def _is_id(text: str) -> bool:
    allowed = all(character.isascii() and (character.isalnum() or character in "._:-") for character in text)
    return 0 < len(text) <= MAX_ID_CHARACTERS and allowed


def _shown(info: SessionInfo | None, id: str) -> dict[str, Any]:
    """Return a session for a client. Raises ProtocolError if there is none."""
    if info is None:
        raise ProtocolError(
            404,
            f"Session {id[:MAX_ID_CHARACTERS]!r} does not exist. Its id is in the header X-Session-Id of its answers; it is "
            "forgotten some days after its end.",
            "session_not_found",
        )
    result: dict[str, Any] = {"id": info.id, "object": "session", "state": str(info.state), "requests": info.requests}
    if info.reward is not None:
        result["reward"] = info.reward
    return result | ({"step": info.step} if info.step else {})


def _in_use() -> ProtocolError:
    return ProtocolError(
        409, "X-Session-Id: is in use with another key; send another id, such as a UUID.", "session_in_use"
    )


def _has_ended(info: SessionInfo) -> ProtocolError:
    return ProtocolError(
        409, f"Session {info.id}: has ended ({info.state}); begin another one.", "session_ended", "X-Session-Id"
    )


def _reward(body: bytes) -> tuple[float, str]:
    """Return the reward and the JSON of what is logged, from the body of a request. Raises ProtocolError."""
    try:
        given = from_json(body)
    except ValueError as error:
        raise invalid(f"body: {str(error)[:200]}; expected a JSON object") from None
    if not isinstance(given, dict) or not {"reward"} <= given.keys() <= {"reward", "logged"}:
        raise invalid('body: expected an object such as {"reward": 1.0}, with "logged" or without it')
    reward, logged = given["reward"], given.get("logged") or {}
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not -MAX_SETTING <= reward <= MAX_SETTING:
        raise invalid(f"reward: expected a number from -{MAX_SETTING:g} to {MAX_SETTING:g}", "reward", "invalid_value")
    if not isinstance(logged, dict) or cleaned(logged) != logged or (given.get("logged") is not None and not logged):
        raise invalid(
            "logged: expected an object of numbers, booleans and texts, with names of letters, digits and _",
            "logged",
            "invalid_value",
        )
    return float(reward), json.dumps(logged, sort_keys=True)


def _unavailable() -> ProtocolError:
    return ProtocolError(
        503,
        "The policy cannot answer at the moment, such as before its first weights or after a fault; send the request again.",
        "unavailable",
        headers={"retry-after": "2"},
    )
