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
import threading
import time
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    SessionState,
    TrafficStore,
    digest_of,
    logged_of,
)
from quartet.config.agent import AgentConfig
from quartet.config.section import MAX_SETTING
from quartet.config.traffic import TrafficConfig
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.logged_values import problem_of
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.errors import BufferFailed, QuartetError, ServiceUnavailable
from quartet.services.generator.sessions.protocol import (
    Call,
    ProtocolError,
    invalid,
)
from quartet.services.generator.sessions.session import Session, SessionLimits
from quartet.services.generator.sessions.texts import PolicyTexts
from quartet.services.generator.sessions.traffic_session import (
    NoRecords,
    RecordedSession,
    SessionRecords,
    UserSession,
    unavailable,
)
from quartet.services.generator.sessions.traffic_turns import Answered, Period, TrafficTurns

if TYPE_CHECKING:  # The HTTP server is loaded only for a run with requests of agents or users.
    from quartet.services.generator.sessions.app import SessionServer

log = structlog.get_logger()

MAX_LOADED = 1000
"""Sessions in memory. Those that were used last stay."""
MAX_ID_CHARACTERS = 128
"""Length of the id of a session."""
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
        self._loaded: OrderedDict[str, RecordedSession] = OrderedDict()
        self._loading: dict[str, asyncio.Task[RecordedSession]] = {}
        self.turns = TrafficTurns()
        # Periods that have ended, whose outcome is not recorded in all their sessions.
        self._ended: deque[Period] = deque()
        self._recording = threading.Lock()
        self.counts: Counter[str] = Counter()
        server.start(self)

    @property
    def model(self) -> str:
        """Name of the policy for requests."""
        return self._run

    def base_url(self, agent: AgentConfig, encrypted: bool) -> str:
        """Return the URL for clients on this machine, or the one that is advertised."""
        return agent.base_url(self._server.address, encrypted)

    def close(self) -> None:
        """End the server."""
        self.record_outcomes()
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
        self.record_outcomes()
        self._store.expire()
        self._store.end_lost_periods()

    def end_period(self, attested: bool) -> None:
        """End the present period: its sessions can be trained if its weights were attested. For the thread of the engine."""
        self._queue_outcome(self.turns.end_period(attested))

    def record_outcomes(self) -> None:
        """Record in sessions whether their ended periods were attested. After an error of Redis, a later call repeats it.

        Any thread may call it.
        """
        while self._ended and self._recording.acquire(blocking=False):
            try:
                self._record_outcome(self._ended[0])
                self._ended.popleft()
            except QuartetError as error:
                log.warning("outcome of an attestation not recorded yet", error=str(error))
                return
            finally:
                self._recording.release()

    def _record_outcome(self, period: Period) -> None:
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
            self._queue_outcome(period)

    def _queue_outcome(self, period: Period) -> None:
        self._ended.append(period)
        with suppress(RuntimeError):  # The process ends, see ``close``.
            self._server.threads.submit(self.record_outcomes)

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

    async def _loaded_session(self, info: SessionInfo) -> RecordedSession:
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

    async def _load(self, info: SessionInfo) -> RecordedSession:
        session = self._new_session(info)
        if (known := self._loaded.get(info.id)) is not None:
            await known.settle()
            session.refused = known.refused
        try:
            await session.repeat()
        except (ServiceUnavailable, BufferFailed) as error:
            log.error("the buffer failed", error=str(error))
            raise unavailable() from error
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

    def _new_session(self, info: SessionInfo) -> RecordedSession:
        records = SessionRecords(self, self._store, info, self._config.session_seconds)
        return RecordedSession(info, self, records, self._store, self._config.session_seconds)

    async def _without_record(self, shown: str) -> Session:
        """Return a session for one request that is not trained."""
        number = await self._on_thread(self._store.new_number)
        return UserSession(SessionInfo(shown, SessionState.OPEN, number), self, NoRecords())

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
            raise unavailable() from error

    def _check_operator(self, user: User, what: str) -> None:
        if user.access is not Access.OPERATOR:
            raise ProtocolError(403, f"Only the key of an operator {what}.", "permission_denied")


def _is_id(text: str) -> bool:
    allowed = all(character.isascii() and (character.isalnum() or character in "._:-") for character in text)
    # In a path, . and .. name folders.
    return 0 < len(text) <= MAX_ID_CHARACTERS and allowed and text not in (".", "..")


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
    if not isinstance(logged, dict) or (given.get("logged") is not None and not logged):
        raise invalid("logged: expected an object of numbers, booleans and texts", "logged", "invalid_value")
    if (problem := problem_of(logged)) is not None:
        raise invalid(f"logged: {problem}", "logged", "invalid_value")
    return float(reward), json.dumps(logged, sort_keys=True)
