"""Turn records: the turns of unfinished episodes, from the process that generates to the one that continues after it.

A turn is recorded before its answer leaves the process, and the environment's answer before generation continues. So a process
that generates the trajectory again continues at the first turn without a record. The records of a step stay until it is
committed. See proto/quartet/v1/turn_record.proto for the format.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import structlog

from quartet.buffer.connection import Redis, translate_errors
from quartet.codec.turn_records import reply_from_bytes, reply_to_bytes, turn_from_bytes, turn_to_bytes
from quartet.contract.generation import GenerationBatch
from quartet.contract.trajectory import EnvironmentReply, TrajectoryId
from quartet.contract.turn_record import EpisodeRecord, RecordedTurn, origins
from quartet.errors import InvalidRequest, ServiceUnavailable

log = structlog.get_logger()

LIFETIME_SECONDS = 24 * 3600
"""Time after the last record of an episode until Redis drops its records. A last resort: the orchestrator forgets them."""
PATIENCE_SECONDS = 30.0
"""Longest wait for a server that is down. A generated turn would be lost with the first failed command."""
CLOSE_SECONDS = 5.0
"""Longest wait for a server that is down, once the generation has ended."""
POLL_SECONDS = 0.1
"""Seconds between two attempts."""

Result = TypeVar("Result")


class TurnRecordStore:
    """The turn records of one run."""

    def __init__(self, client: Redis, url: str, run: str, lost: Callable[[], None] = lambda: None) -> None:
        """``lost`` is called if a command of ``records_of`` cannot reach the server."""
        self._client, self._url, self._run, self._lost = client, url, run, lost

    def records_of(self, batch: GenerationBatch) -> TurnRecords:
        """Return the records of the trajectories that ``batch`` requests."""
        return TurnRecords(self._client, self._url, origins(batch), self._lost)

    def forget_step(self, step: int) -> None:
        """Remove the records of a step. Call it after its commit."""
        index = f"quartet:{self._run}:turns:{step}"
        with translate_errors(self._url):
            members: Iterable[Any] = self._client.smembers(index)
            keys = [f"{index}/{member.decode()}" for member in members]
            self._client.unlink(index, *keys)

    def forget_before(self, first: int) -> None:
        """Remove the records of all steps before ``first``."""
        prefix = f"quartet:{self._run}:turns:"
        with translate_errors(self._url):
            keys = list(self._client.scan_iter(match=f"{prefix}*", count=1000))
            old = [key for key in keys if _step(key.decode().removeprefix(prefix)) < first]
            for start in range(0, len(old), 1000):
                self._client.unlink(*old[start : start + 1000])

    def forget_all(self) -> None:
        """Remove all records of the run."""
        self.forget_before(2**63)


class TurnRecords:
    """Records of the trajectories that one Generate call requests. Thread-safe.

    Only records of this call's origin are seen: those of other weights, settings or prompts are none. See ``origins``. A server
    that is down is waited for. ``revoke`` them unless the weights of the engine are attested at the end of the call.
    """

    def __init__(
        self, client: Redis, url: str, origins: Mapping[TrajectoryId, str], lost: Callable[[], None] = lambda: None
    ) -> None:
        """``origins``: that of each requested trajectory. ``lost`` is called if a command cannot reach the server."""
        self._client, self._url, self._origins, self._lost = client, url, origins, lost
        self._closed, self._revoked = threading.Event(), threading.Event()

    def load(self, id: TrajectoryId) -> EpisodeRecord:
        """Return the records of an episode, up to the first gap. Records of another origin and damaged ones are removed.

        Raises ServiceUnavailable if the server cannot be reached.
        """
        key, origin = self._key(id), self._origins[id].encode()
        fields: Mapping[Any, Any] = self._patiently(lambda: self._client.hgetall(key))
        if foreign := [name for name in fields if not name.startswith(origin)]:
            self._patiently(lambda: self._client.hdel(key, *foreign))
        own = {name.decode().partition("/")[2]: value for name, value in fields.items() if name.startswith(origin)}
        try:
            turns = tuple(map(turn_from_bytes, _without_gap(own, "turn")))
            replies = [reply_from_bytes(value) for value in _without_gap(own, "reply")]
            if replies and (state := own.get(f"state/{len(replies) - 1}")) is not None:
                replies[-1] = replace(replies[-1], state=state.decode())
        except InvalidRequest as error:
            log.warning("turn records dropped", key=key, error=str(error))
            self.forget([id])
            return EpisodeRecord()
        return EpisodeRecord(turns, tuple(replies))

    def append(self, id: TrajectoryId, turn: RecordedTurn) -> bool:
        """Record a turn. Return False if another turn is recorded already with this index: then that one counts.

        Returns True if the same turn is recorded already. Raises ServiceUnavailable if the server cannot be reached, BufferFailed
        if it is full, InvalidRequest if the turn is too large.
        """
        return self._append(id, f"turn/{turn.index}", turn_to_bytes(turn))

    def append_reply(self, id: TrajectoryId, number: int, reply: EnvironmentReply) -> bool:
        """Record the environment's reply to turn ``number`` - 1, or to the reset if it is 0. Returns and raises as ``append``.

        Only the last reply keeps its state.
        """
        value = reply_to_bytes(replace(reply, state=""))
        if not reply.state:
            return self._append(id, f"reply/{number}", value)
        key, origin = self._key(id), self._origins[id]

        def write_state(pipeline: Any) -> None:
            # Before the reply: one without its state could not be restored.
            pipeline.hsetnx(key, f"{origin}/state/{number}", reply.state)

        def drop_state(pipeline: Any) -> None:
            pipeline.hdel(key, f"{origin}/state/{number - 1}")

        return self._append(id, f"reply/{number}", value, write_state, drop_state)

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """Remove the records of these episodes, of every origin."""
        keys = [self._key(id) for id in ids]
        if keys:
            self._patiently(lambda: self._client.unlink(*keys))

    def revoke(self) -> None:
        """Remove the records of all these trajectories, also those that other threads write at this moment or later.

        Raises as ``load``.
        """
        self._revoked.set()
        self.forget(self._origins)

    def close(self) -> None:
        """Do not wait for a server that is down any longer than CLOSE_SECONDS. Commands stay possible."""
        self._closed.set()

    def _append(
        self,
        id: TrajectoryId,
        name: str,
        value: bytes,
        before: Callable[[Any], None] = lambda pipeline: None,
        after: Callable[[Any], None] = lambda pipeline: None,
    ) -> bool:
        """Write a field if it does not exist. ``before`` and ``after`` add commands to the same round trip."""
        key, index = self._key(id), f"quartet:{id.run}:turns:{id.step}"
        field = f"{self._origins[id]}/{name}"

        def write() -> bool:
            with self._client.pipeline(transaction=False) as pipeline:
                before(pipeline)
                place = len(pipeline)
                pipeline.hsetnx(key, field, value)
                pipeline.sadd(index, f"{id.prompt}/{id.sample}")
                pipeline.expire(index, LIFETIME_SECONDS)
                pipeline.expire(key, LIFETIME_SECONDS)
                after(pipeline)
                written = pipeline.execute()[place]
            if written and self._revoked.is_set():
                self._client.hdel(key, field)
            # A lost response leads to a second attempt, which finds the value of the first.
            return bool(written) or self._client.hget(key, field) == value

        return self._patiently(write)

    def _key(self, id: TrajectoryId) -> str:
        return f"quartet:{id.run}:turns:{id.step}/{id.prompt}/{id.sample}"

    def _patiently(self, command: Callable[[], Result]) -> Result:
        start, closed = time.monotonic(), None
        while True:
            try:
                with translate_errors(self._url, self._lost):
                    return command()
            except ServiceUnavailable:
                now = time.monotonic()
                if self._closed.is_set():
                    closed = closed or now
                if now > start + PATIENCE_SECONDS or (closed is not None and now > closed + CLOSE_SECONDS):
                    raise
            time.sleep(POLL_SECONDS)


def _without_gap(fields: Mapping[str, bytes], kind: str) -> list[bytes]:
    """Return the values of ``kind``/0, ``kind``/1 and so on, up to the first that does not exist."""
    result: list[bytes] = []
    for number in count():
        value = fields.get(f"{kind}/{number}")
        if value is None:
            return result
        result.append(value)
    raise AssertionError("count does not end")


def _step(name: str) -> int:
    """Return the step of the end of a key, STEP or STEP/PROMPT/SAMPLE; 0 for one that is none."""
    step = name.partition("/")[0]
    return int(step) if step.isdecimal() else 0
