"""An environment service with a game of numbers, in this process: correct, fast, and easy to make wrong."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.errors import InvalidRequest, ServiceBusy, SessionLost
from quartet.rewards.reward_source import parse_fields

VOCABULARY, MAX_SESSIONS, LAST_TURN = 24, 40, 3


@dataclass
class Episode:
    """One session: its last call with the reply, and the sum of its turns."""

    seed: int
    request: tuple[Any, ...]
    reply: EnvironmentReply
    turn: int = 0
    total: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class TinyEnvironment:
    """Sessions whose observations depend on the seed and on all tokens so far. They end after LAST_TURN turns.

    The turn after the second one begins a branch.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, Episode] = {}
        self.lock = threading.Lock()

    def answer(self, seed: int, turn: int, total: int) -> EnvironmentReply:
        """Return the reply to a turn; 0 is the reset."""
        draw = random.Random(f"{seed}/{turn}/{total}")
        ids = np.array([draw.randrange(VOCABULARY) for _ in range(2 + turn % 2)], np.int32)
        over = turn >= LAST_TURN
        reply = EnvironmentReply(ids, draw.random() if turn else 0.0, over, state="" if over else self.state(total))
        return replace(reply, observation=ids[:0], prompt=ids) if turn == 2 else reply

    def state(self, total: int) -> str:
        """Return the state of a session."""
        return str(total)

    def failed(self) -> EnvironmentReply:
        """Return the reply of an environment that fails."""
        return EnvironmentReply.failed(Outcome.ENVIRONMENT_ERROR, "the game has ended")

    def known(self, ids: IntArray) -> int:
        """Return the sum of the ids that have a text."""
        return int(ids[ids < VOCABULARY].sum())

    def open(self, session: str, episode: Episode) -> Episode:
        """Keep an episode under its name. Raises ServiceBusy without room."""
        if session not in self.sessions and len(self.sessions) >= MAX_SESSIONS:
            raise ServiceBusy(f"{MAX_SESSIONS} sessions are open")
        self.sessions[session] = episode
        return episode

    def find(self, session: str) -> Episode:
        """Return an open session. Raises SessionLost."""
        episode = self.sessions.get(session)
        if episode is None:
            raise SessionLost(f"session {session}: unknown")
        return episode

    def repeats(self, episode: Episode, request: tuple[Any, ...]) -> bool:
        """Return whether a call repeats the last one of its session."""
        return episode.request == request

    def check_turn(self, episode: Episode, turn: int) -> None:
        """Raise InvalidRequest for another turn than the next one."""
        if turn != episode.turn + 1 or episode.reply.done:
            raise InvalidRequest(f"got turn {turn} after turn {episode.turn}")

    def parse(self, fields: str) -> dict[str, Any]:
        """Return the fields of a prompt. Raises InvalidRequest."""
        (values,) = parse_fields([fields] if fields else (), 1)
        return values

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        """See EnvironmentHost."""
        values = self.parse(fields)
        request = ("reset", seed, fields, token_ids.tobytes())
        with self.lock:
            last = self.sessions.get(session)
            if last is not None and self.repeats(last, request):
                return last.reply
            reply = self.failed() if values.get("fail") else self.answer(seed, 0, self.known(token_ids))
            return self.open(session, Episode(seed, request, reply, total=self.known(token_ids))).reply

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        """See EnvironmentHost."""
        request = ("step", turn, token_ids.tobytes())
        with self.lock:
            episode = self.find(session)
            if self.repeats(episode, request):
                return episode.reply
            self.check_turn(episode, turn)
            episode.total += self.known(token_ids)
            episode.request, episode.turn = request, turn
            episode.reply = self.answer(episode.seed, turn, episode.total)
            return episode.reply

    def restore(
        self, session: str, seed: int, fields: str, token_ids: IntArray, turn: int, state: str
    ) -> EnvironmentReply:
        """See EnvironmentHost."""
        self.parse(fields)
        reply = EnvironmentReply(np.zeros(0, np.int32), 0.0, False)
        with self.lock:
            self.open(session, Episode(seed, (), reply, self.turn_of(turn), int(state)))
            return reply

    def turn_of(self, turn: int) -> int:
        """Return the number of turns of a restored session."""
        return turn

    def close_session(self, session: str) -> None:
        """See EnvironmentHost."""
        with self.lock:
            self.sessions.pop(session, None)

    def status(self) -> ServiceStatus:
        """See EnvironmentHost."""
        return ServiceStatus(
            role=Role.ENVIRONMENT, model="tiny", tokenizer_fingerprint="ab" * 32, vocabulary_size=VOCABULARY
        )

    def close(self) -> None:
        """Do nothing: there are no processes."""
