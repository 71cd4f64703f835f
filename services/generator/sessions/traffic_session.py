"""One session of a user in this process, and its recorded turns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from quartet.buffer.traffic import SessionInfo, SessionRequest, TrafficStore, packed
from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.contract.turn_record import EpisodeRecord, RecordedTurn
from quartet.errors import FailedPrecondition
from quartet.services.generator.sessions.protocol import (
    CHAT_PATH,
    Call,
    ProtocolError,
    invalid,
    parse_chat,
    parse_completion,
)
from quartet.services.generator.sessions.responses import Header
from quartet.services.generator.sessions.session import Answer, Session
from quartet.services.generator.sessions.traffic_turns import Period

if TYPE_CHECKING:
    from quartet.services.generator.sessions.traffic import TrafficSessions

log = structlog.get_logger()

MAX_SESSION_BYTES = 4 * 1024 * 1024
"""Size of the stored requests of a session, compressed, after which it takes no further one."""


class UserSession(Session):
    """Requests of one session of a user."""

    _whole = "a session"

    def __init__(self, info: SessionInfo, traffic: TrafficSessions, records: SessionRecords | NoRecords) -> None:
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
        return unavailable()

    def _over(self) -> ProtocolError:
        return ProtocolError(
            409,
            f"Session {self.info.id}: has ended while this request waited; begin another one.",
            "session_ended",
            "X-Session-Id",
        )


class RecordedSession(UserSession):
    """A session that is recorded. ``num_requests``: those with an answer."""

    def __init__(
        self,
        info: SessionInfo,
        traffic: TrafficSessions,
        records: SessionRecords,
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
            if request.delivered:
                self.set_delivered(answer)
            self.release(answer)
        # Turns of requests whose answers could not be recorded. An equal request gets them.
        used = {index for request in requests for index in request.turns}
        self.use_records(EpisodeRecord(tuple(turn for turn in record.turns if turn.index not in used)))
        self._next_index = len(record.turns)
        self._is_repeating = False

    async def deliver(self, answer: Answer) -> None:
        number = self._numbers.get(answer)
        # An answer is recorded as not delivered first.
        if number is not None and not answer.delivered:
            await self._on_thread(self._store.set_delivered, self.info.id, number)
        self.set_delivered(answer)

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
            request = SessionRequest(call.path, call.body, turns, delivered=False, key=answer.key or "")
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


class SessionRecords:
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


class NoRecords:
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


def unavailable() -> ProtocolError:
    """Return the error of a request that the policy cannot answer at the moment."""
    return ProtocolError(
        503,
        "The policy cannot answer at the moment, such as before its first weights or after a fault; send the request again.",
        "unavailable",
        headers={"retry-after": "2"},
    )
