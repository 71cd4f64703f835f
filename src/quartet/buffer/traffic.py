"""Sessions of users in Redis: what they asked, what the policy answered, their rewards, and the steps that train on them.

A session is a hash with its requests and turns. It is written before an answer leaves, so any process that generates can continue
it. A reward ends the session and puts it into a queue, in one transaction. The queue is in the order of rewards. A trajectory of
a step takes the first session of the queue, also in one transaction, and keeps it if it is generated again. So a session with a
reward becomes exactly one trajectory. Once its step is committed, only its state is left.

A turn is recorded with the name of a period: the time between two looks at the weights of its engine. The session reaches the
queue once the weights were attested after each of its periods. If a process ends before that, its sessions cannot be trained.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from redis.exceptions import WatchError

from quartet.buffer.connection import Redis, translate_errors
from quartet.codec.turn_records import turn_from_bytes, turn_to_bytes
from quartet.contract.trajectory import TrajectoryId
from quartet.contract.turn_record import EpisodeRecord, RecordedTurn
from quartet.errors import FailedPrecondition
from quartet.system.child_processes import has_ended, this_process

Result = TypeVar("Result")

STATE_SECONDS = 7 * 86400
"""Time for which the state of a session is kept after its end."""
UNATTESTED_SECONDS = 600.0
"""Longest wait of a session with a reward until the weights of its turns are attested. It ends earlier if their process has."""


class SessionState(StrEnum):
    """State of a session.

    Open: without a reward. Rewarded: in the queue, or it waits until the weights of its turns are attested. Taken: a trajectory
    of a step that is not committed.
    """

    OPEN = "open"
    REWARDED = "rewarded"
    TAKEN = "taken"
    TRAINED = "trained"
    STALE = "stale"
    EXPIRED = "expired"
    DELETED = "deleted"
    UNUSABLE = "unusable"


ENDED = (SessionState.TRAINED, SessionState.STALE, SessionState.EXPIRED, SessionState.DELETED, SessionState.UNUSABLE)
"""States of sessions of which only the state is left."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as Redis has it.

    ``number``: unique in the run, from 1; 0 after the end. ``owner``: digest of the key that opened it. ``requests``: number of
    answered requests. ``step``: that of its trajectory, 0 before. ``logged_digest``: digest of what came with the reward.
    """

    id: str
    state: SessionState
    number: int = 0
    owner: str = ""
    requests: int = 0
    reward: float | None = None
    step: int = 0
    logged_digest: str = ""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request with an answer.

    ``path`` is that of its endpoint. ``turns``: indices of the turns that answer it. ``delivered``: its client got the answer.
    ``key``: its Idempotency-Key, "" without one.
    """

    path: str
    body: bytes
    turns: tuple[int, ...] = ()
    delivered: bool = True
    key: str = ""


class TrafficStore:
    """The sessions of one run. Raises ServiceUnavailable if Redis cannot be reached, BufferFailed if it is full. Thread-safe."""

    def __init__(self, client: Redis, url: str, run: str, lost: Callable[[], None] = lambda: None) -> None:
        """``lost`` is called if a command cannot reach the server."""
        self._client, self._url, self._lost = client, url, lost
        self._prefix = f"quartet:{run}:traffic:"
        self._queue, self._open, self._unattested, self._committed = (
            f"{self._prefix}{name}" for name in ("queue", "open", "unattested", "committed")
        )

    def info(self, id: str) -> SessionInfo | None:
        """Return a session, None if there is none with this id."""
        with self._translated():
            names = ("state", "number", "owner", "requests", "reward", "step", "logged_digest")
            values: list[Any] = self._client.hmget(self._session(id), names)
        state, number, owner, requests, reward, step, logged = (
            None if value is None else value.decode() for value in values
        )
        if state is None:
            return None
        return SessionInfo(
            id,
            SessionState(state),
            int(number or 0),
            owner or "",
            int(requests or 0),
            None if reward is None else float(reward),
            int(step or 0),
            logged or "",
        )

    def new_number(self) -> int:
        """Return a number that no session of the run has."""
        with self._translated():
            number: int = self._client.incr(f"{self._prefix}number")
        return number

    def count_open(self) -> int:
        """Return the number of sessions without a reward."""
        with self._translated():
            return int(self._client.zcard(self._open))

    def count_rewarded(self) -> int:
        """Return the number of sessions with a reward that wait for a step."""
        # Together, because a session may move from one to the other.
        with self._translated(), self._client.pipeline(transaction=True) as pipe:
            pipe.zcard(self._queue)
            pipe.zcard(self._unattested)
            return sum(map(int, pipe.execute()))

    def append_turn(self, session: SessionInfo, turn: RecordedTurn, seconds: float, period: str = "") -> bool:
        """Record a turn. The first one opens the session, which expires ``seconds`` after its last request.

        ``period``: name of the period of its engine, which ``end_period`` ends; "" if its weights are attested already. Return
        False if another turn is recorded with its index, or the session is not open any more, or another one with this id is.
        """
        key, name, value = self._session(session.id), f"turn/{turn.index}", turn_to_bytes(turn)

        def write(pipe: Any) -> bool:
            state, number, present, periods = pipe.hmget(key, ("state", "number", name, "periods"))
            opens = state is None and turn.index == 0
            if not opens and (state != SessionState.OPEN.value.encode() or int(number) != session.number):
                return False
            if present not in (None, value):
                return False
            pipe.multi()
            fields: dict[str, Any] = {name: value}
            if opens:
                fields |= {"state": SessionState.OPEN.value, "number": session.number, "owner": session.owner}
                fields["requests"] = 0
                pipe.zadd(self._open, {session.id: time.time() + seconds})
            if period:
                fields["periods"] = " ".join(sorted({*names_in(periods), period}))
            pipe.hset(key, mapping=fields)
            return True

        with self._translated():
            return self._transaction(write, key)

    def end_period(self, id: str, period: str, attested: bool) -> None:
        """Take note whether the weights were those of their digest during a period in which a session got turns.

        If they were not, it cannot be trained, whatever its state is.
        """
        key = self._session(id)

        def write(pipe: Any) -> None:
            state, periods, spoiled = pipe.hmget(key, ("state", "periods", "spoiled"))
            if state is None or state.decode() in ENDED:
                return
            left = names_in(periods) - {period}
            # A session that cannot be trained ends when a step takes it.
            is_free = not attested or spoiled is not None or not left
            rewarded = pipe.zscore(self._unattested, id) if is_free else None
            pipe.multi()
            pipe.hset(key, "periods", " ".join(sorted(left))) if left else pipe.hdel(key, "periods")
            if not attested:
                pipe.hset(key, "spoiled", 1)
            if rewarded is not None:
                pipe.zrem(self._unattested, id)
                pipe.zadd(self._queue, {id: rewarded})

        with self._translated():
            self._transaction(write, key, self._unattested)

    def end_lost_periods(self) -> None:
        """Give up the sessions with a reward whose turns nothing will attest: their process has ended, or is silent for long."""
        with self._translated():
            waiting: Any = self._client.zrange(self._unattested, 0, -1, withscores=True)
        for each, since in waiting:
            id = each.decode()
            with self._translated():
                periods = names_in(self._client.hget(self._session(id), "periods"))
            late = time.time() > since + UNATTESTED_SECONDS
            for period in [name for name in periods if late or has_ended(process_of(name))]:
                self.end_period(id, period, attested=False)

    def append_request(self, id: str, number: int, request: SessionRequest, seconds: float) -> bool:
        """Record request ``number``, from 0, whose turns are recorded. Return False if the session has gone on without it."""
        key = self._session(id)

        def write(pipe: Any) -> bool:
            state, count = pipe.hmget(key, ("state", "requests"))
            if state != SessionState.OPEN.value.encode() or int(count) != number:
                return False
            pipe.multi()
            pipe.hset(key, mapping={f"request/{number}": packed(request)})
            if not request.delivered:
                pipe.hset(key, f"lost/{number}", 1)
            pipe.hset(key, "requests", number + 1)
            pipe.zadd(self._open, {id: time.time() + seconds})
            return True

        with self._translated():
            return self._transaction(write, key)

    def set_delivered(self, id: str, number: int) -> None:
        """Record that the client got the answer to request ``number``. Has no effect after the reward."""
        key = self._session(id)

        def write(pipe: Any) -> None:
            if pipe.hget(key, "state") == SessionState.OPEN.value.encode():
                pipe.multi()
                pipe.hdel(key, f"lost/{number}")

        with self._translated():
            self._transaction(write, key)

    def load(self, id: str) -> tuple[list[SessionRequest], EpisodeRecord]:
        """Return the requests of a session, and its turns. Raises InvalidRequest if a turn is damaged."""
        with self._translated():
            fields: Mapping[Any, Any] = self._client.hgetall(self._session(id))
        requests: list[SessionRequest] = []
        while (value := fields.get(f"request/{len(requests)}".encode())) is not None:
            head, _, body = zlib.decompress(value).partition(b"\n")
            path, *indices = head.decode().split(" ")
            delivered = f"lost/{len(requests)}".encode() not in fields
            key = unquote(indices.pop().removeprefix(KEY)) if indices and indices[-1].startswith(KEY) else ""
            requests.append(SessionRequest(path, body, tuple(map(int, indices)), delivered, key))
        turns: list[RecordedTurn] = []
        while (value := fields.get(f"turn/{len(turns)}".encode())) is not None:
            turns.append(turn_from_bytes(value))
        return requests, EpisodeRecord(tuple(turns))

    def is_spoiled(self, id: str) -> bool:
        """Return whether a session has turns of weights that were not those of their digest, or that no one could attest."""
        with self._translated():
            return bool(self._client.hexists(self._session(id), "spoiled"))

    def give_reward(self, id: str, reward: float, logged: str = "") -> SessionInfo | None:
        """End a session with its reward, unless it has ended. Return it as it is then, None if there is none with this id.

        ``logged``: JSON for the records of the run.
        """
        key = self._session(id)

        def write(pipe: Any) -> None:
            state, requests, periods, spoiled = pipe.hmget(key, ("state", "requests", "periods", "spoiled"))
            if state == SessionState.OPEN.value.encode() and int(requests):
                pipe.multi()
                fields = {"state": SessionState.REWARDED.value, "reward": repr(reward), "logged": logged}
                pipe.hset(key, mapping={**fields, "logged_digest": digest_of(logged)})
                is_decided = not periods or spoiled is not None
                pipe.zadd(self._queue if is_decided else self._unattested, {id: time.time()})
                pipe.zrem(self._open, id)

        with self._translated():
            self._transaction(write, key)
        return self.info(id)

    def logged(self, id: str) -> str:
        """Return the JSON that came with the reward, "" without any."""
        with self._translated():
            value: Any = self._client.hget(self._session(id), "logged")
        return (value or b"").decode()

    def taken(self, step: int) -> dict[str, str]:
        """Return the sessions that are trajectories of a step, by PROMPT/SAMPLE."""
        with self._translated():
            fields: Mapping[Any, Any] = self._client.hgetall(self._step(step))
        return {name.decode(): value.decode() for name, value in fields.items()}

    def take(self, trajectory: TrajectoryId) -> str | None:
        """Return the session of a trajectory: the one that it has, or the first of the queue. None if the queue is empty.

        Raises FailedPrecondition if the step is committed: a call that its caller has left takes no more sessions.
        """
        steps, name = self._step(trajectory.step), f"{trajectory.prompt}/{trajectory.sample}"

        def write(pipe: Any) -> bytes | None:
            if trajectory.step <= int(pipe.get(self._committed) or 0):
                raise FailedPrecondition(f"step {trajectory.step} is committed; it takes no further session")
            earlier: bytes | None = pipe.hget(steps, name)
            first: bytes | None = next(iter(pipe.zrange(self._queue, 0, 0)), None)
            if earlier is not None or first is None:
                return earlier
            pipe.multi()
            pipe.zrem(self._queue, first)
            pipe.hset(steps, name, first)
            pipe.hset(
                self._session(first.decode()),
                mapping={"state": SessionState.TAKEN.value, "step": trajectory.step},
            )
            return first

        with self._translated():
            id = self._transaction(write, steps, self._queue, self._committed)
        return None if id is None else id.decode()

    def drop(self, trajectory: TrajectoryId, id: str, state: SessionState) -> None:
        """End a session that cannot be trained, so that its trajectory takes another one, unless it has another one already."""
        steps, name = self._step(trajectory.step), f"{trajectory.prompt}/{trajectory.sample}"

        def write(pipe: Any) -> None:
            if pipe.hget(steps, name) == id.encode():
                kept = self._kept(pipe, id)
                pipe.multi()
                pipe.hdel(steps, name)
                self._end(pipe, id, kept | {"state": state.value})

        with self._translated():
            self._transaction(write, steps)

    def delete(self, id: str) -> SessionInfo | None:
        """Delete what a session has, unless a step has taken it. Return it as it is then, None if there is none."""
        self._end_unless_taken(id, SessionState.DELETED)
        return self.info(id)

    def _end_unless_taken(self, id: str, state: SessionState) -> None:
        key = self._session(id)

        def write(pipe: Any) -> None:
            if (pipe.hget(key, "state") or b"").decode() in (SessionState.OPEN, SessionState.REWARDED):
                kept = self._kept(pipe, id)
                pipe.multi()
                pipe.zrem(self._queue, id)
                pipe.zrem(self._open, id)
                pipe.zrem(self._unattested, id)
                self._end(pipe, id, kept | {"state": state.value})

        with self._translated():
            self._transaction(write, key, self._queue)

    def expire(self) -> None:
        """End the sessions whose time is over."""
        with self._translated():
            ids: Iterable[Any] = self._client.zrangebyscore(self._open, 0, time.time(), 0, 1000)
            for each in ids:
                id = each.decode()

                def write(pipe: Any, id: str = id) -> None:
                    late = (pipe.zscore(self._open, id) or time.time()) <= time.time()
                    if late and pipe.hget(self._session(id), "state") == SessionState.OPEN.value.encode():
                        kept = self._kept(pipe, id)
                        pipe.multi()
                        pipe.zrem(self._open, id)
                        self._end(pipe, id, kept | {"state": SessionState.EXPIRED.value})

                self._transaction(write, self._session(id), self._open)

    def forget_step(self, step: int) -> None:
        """Keep only the state of the sessions that a step has trained on. Call it after its commit."""
        for id in self.taken(step).values():
            with self._translated(), self._client.pipeline(transaction=True) as pipe:
                self._end(pipe, id, self._kept(self._client, id) | {"state": SessionState.TRAINED.value, "step": step})
                pipe.execute()
        with self._translated(), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._committed, step)
            pipe.unlink(self._step(step))
            pipe.execute()

    def forget_before(self, first: int) -> None:
        """Do ``forget_step`` for all steps before ``first``. The others take sessions, also if they were committed."""
        prefix = f"{self._prefix}step:"
        with self._translated():
            names = [
                key.decode().removeprefix(prefix) for key in self._client.scan_iter(match=f"{prefix}*", count=1000)
            ]
        for step in sorted(int(name) for name in names if name.isdecimal() and int(name) < first):
            self.forget_step(step)
        with self._translated():
            self._client.set(self._committed, first - 1)

    def forget_all(self) -> None:
        """End all sessions that no step has taken: policies that the run does not have any more may have answered them."""
        with self._translated():
            queued: Any = self._client.zrange(self._queue, 0, -1)
            unqueued: Any = [
                *self._client.zrange(self._open, 0, -1),
                *self._client.zrange(self._unattested, 0, -1),
            ]
            self._client.unlink(self._committed)
        for id in [*queued, *unqueued]:
            self._end_unless_taken(id.decode(), SessionState.STALE)

    def remove_all(self) -> None:
        """Remove everything but the numbers that were used: it is that of an earlier run with this name."""
        number = f"{self._prefix}number".encode()
        with self._translated():
            keys: Any = self._client.scan_iter(match=f"{self._prefix}*", count=1000)
            for key in keys:
                if key != number:
                    self._client.unlink(key)

    def _kept(self, client: Any, id: str) -> dict[str, Any]:
        """Return what is kept of a session after its end, besides its state."""
        names = ("requests", "reward", "logged_digest")
        return {
            name: value
            for name, value in zip(names, client.hmget(self._session(id), names), strict=True)
            if value is not None
        }

    def _end(self, pipe: Any, id: str, fields: Mapping[str, Any]) -> None:
        """Add the commands that leave only the state of a session."""
        key = self._session(id)
        pipe.delete(key)
        pipe.hset(key, mapping=dict(fields))
        pipe.expire(key, STATE_SECONDS)

    def _session(self, id: str) -> str:
        return f"{self._prefix}session:{id}"

    def _step(self, step: int) -> str:
        return f"{self._prefix}step:{step}"

    def _transaction(self, queue: Callable[[Any], Result], *keys: str) -> Result:
        """Execute the commands that ``queue`` adds, and return its result. Repeat if one of the ``keys`` changed meanwhile.

        A response that was lost leads to a second attempt, which sees what the first one did.
        """
        with self._client.pipeline() as pipe:
            while True:
                pipe.watch(*keys)  # type: ignore[no-untyped-call]
                result = queue(pipe)
                try:
                    pipe.execute()
                except WatchError:
                    continue
                return result

    def _translated(self) -> Any:
        return translate_errors(self._url, self._lost)


KEY = "key="
"""Start of the part of a stored request that has its Idempotency-Key."""


def packed(request: SessionRequest) -> bytes:
    """Return a request as it is stored. Each one repeats the conversation before it, which compresses well."""
    key = [f"{KEY}{quote(request.key, safe='')}"] if request.key else []
    head = " ".join([request.path, *map(str, request.turns), *key])
    return zlib.compress(head.encode() + b"\n" + request.body)


def new_period() -> str:
    """Return the name of a period of this process."""
    return f"{secrets.token_hex(8)}@{this_process()}"


def process_of(period: str) -> str:
    """Return the process of a period."""
    return period.partition("@")[2]


def names_in(periods: Any) -> set[str]:
    """Return the names of periods in a field of a session."""
    return set() if periods is None else set(periods.decode().split())


def digest_of(logged: str) -> str:
    """Return a digest of the JSON that came with a reward."""
    return hashlib.blake2b(logged.encode(), digest_size=16).hexdigest()


def logged_of(text: str) -> dict[str, Any]:
    """Return what came with a reward for the records of the run, from its JSON."""
    logged: dict[str, Any] = json.loads(text) if text else {}
    return logged
