"""The environment of a Generate call, with records: an episode continues after those of an earlier attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from quartet.buffer.turn_records import TurnRecords
from quartet.contract.arrays import IntArray
from quartet.contract.generation import GenerationBatch
from quartet.contract.random_streams import environment_seed
from quartet.contract.trajectory import EnvironmentReply, Outcome, TrajectoryId
from quartet.contract.turn_record import EpisodeDiffers, EpisodeRecord, RecordedTurn

log = structlog.get_logger()


class Environment(Protocol):
    """Environment of a run. Thread-safe; the calls of one session follow each other. A failure is the outcome of a reply."""

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        """Start an episode after the prompt ``token_ids``, int32 [tokens]."""

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        """Give a turn of the policy to the environment, int32 [tokens]. ``turn`` counts from 1."""

    def resume(
        self,
        session: str,
        seed: int,
        fields: str,
        token_ids: IntArray,
        turns: Sequence[IntArray],
        replies: Sequence[EnvironmentReply],
    ) -> EnvironmentReply:
        """Continue an episode in a new session after ``turns``, int32 [tokens] each.

        ``replies`` are the environment's to the reset and to each turn, none of them the last. Return the last of them, or the
        failure of the environment. Raises EpisodeDiffers if it answers otherwise than before.
        """

    def end(self, session: str) -> None:
        """Forget a session, without waiting."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the environment, after the ``record`` of what came before it in an episode that continues."""

    reply: EnvironmentReply
    record: EpisodeRecord = field(default_factory=EpisodeRecord)


class Superseded(Exception):
    """Another process has recorded another turn or reply of this episode, which counts."""


class RecordedEnvironment:
    """An environment whose replies are recorded, and which continues episodes after their records. Thread-safe."""

    def __init__(self, environment: Environment, records: TurnRecords | None, batch: GenerationBatch) -> None:
        """Without ``records``, every episode starts from its beginning. ``batch`` has settings for episodes."""
        assert batch.episode is not None
        self._environment, self._records = environment, records
        self._seed, self._settings = batch.seed, batch.episode

    def begin(self, id: TrajectoryId, session: str, prompt_ids: IntArray) -> Answer:
        """Start an episode, or continue it after its records. Raises Superseded, and the error of records and environment."""
        start = (session, environment_seed(self._seed, id), self._settings.fields.get(id.prompt, "{}"), prompt_ids)
        if self._records is not None and (record := self._records.load(id)).replies:
            try:
                return self._resume(id, record, start)
            except EpisodeDiffers as error:
                log.warning("episode begins again", id=str(id), turns=len(record.turns), cause=str(error))
                self._records.forget([id])
        return Answer(self._recorded(id, 0, self._environment.reset(*start)))

    def _resume(self, id: TrajectoryId, record: EpisodeRecord, start: tuple[str, int, str, IntArray]) -> Answer:
        assert self._records is not None
        record = EpisodeRecord(record.turns[: len(record.replies)], record.replies[: len(record.turns) + 1])
        turns, replies = record.turns, record.replies
        waits, last = len(turns) == len(replies), replies[-1]
        if not waits and (last.done or len(turns) == self._settings.max_turns):
            return Answer(last, record)  # The episode is over.
        answered = [turn.segment.token_ids for turn in turns[: len(replies) - 1]]
        reply = self._environment.resume(*start, answered, replies)
        if reply.outcome is not Outcome.OK:
            log.warning("episode cannot continue", id=str(id), turns=len(turns), cause=reply.detail)
            # What it needs may be lost for good, so another attempt begins again.
            self._records.forget([id])
        elif waits:
            reply = self.step(id, start[0], turns[-1])
        return Answer(reply, record)

    def record(self, id: TrajectoryId, turn: RecordedTurn) -> None:
        """Record a turn. Raises Superseded, and the error of the records."""
        if self._records is not None and not self._records.append(id, turn):
            raise Superseded

    def step(self, id: TrajectoryId, session: str, turn: RecordedTurn) -> EnvironmentReply:
        """Give a recorded turn to the environment, and record the reply. Raises as ``begin``."""
        number = turn.index + 1
        return self._recorded(id, number, self._environment.step(session, number, turn.segment.token_ids))

    def _recorded(self, id: TrajectoryId, number: int, reply: EnvironmentReply) -> EnvironmentReply:
        """Record a reply, unless it is a failure."""
        is_kept = self._records is not None and reply.outcome is Outcome.OK
        if is_kept and self._records is not None and not self._records.append_reply(id, number, reply):
            raise Superseded
        return reply

    def end(self, session: str) -> None:
        """Forget a session, without waiting."""
        self._environment.end(session)
