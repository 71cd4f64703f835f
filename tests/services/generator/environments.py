"""Environments for tests of episodes. They compute with token ids, so nothing is tokenized."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.contract.turn_record import EpisodeDiffers
from tests.unit.models import tiny

Wait = Callable[[str, int], None]
"""Function that delays the answer to a turn of a session. Turn 0 is the reset."""


@dataclass(frozen=True)
class Call:
    """A call that the environment got. ``turn`` 0 is the reset."""

    session: str
    turn: int
    token_ids: tuple[int, ...]


class EchoEnvironment:
    """Environment whose answers are a function of the seed and the tokens of the episode so far.

    An observation has one to three tokens, or ``tokens``. An episode ends after two to four turns, or after ``turns``. ``fail``
    returns a failure for a turn of a session, or None.
    """

    def __init__(
        self,
        wait: Wait = lambda session, turn: None,
        turns: int | None = None,
        tokens: int | None = None,
        first_observation: bool = False,
        fail: Callable[[str, int], EnvironmentReply | None] = lambda session, turn: None,
    ) -> None:
        self._wait, self._turns, self._tokens, self._fail = wait, turns, tokens, fail
        self._first_observation = first_observation
        self._lock = threading.Lock()
        self._episodes: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.resumed: list[Call] = []
        self.most_open = 0
        self.fields: dict[str, str] = {}

    @property
    def sessions(self) -> set[str]:
        """Sessions that are open."""
        return set(self._episodes)

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        with self._lock:
            self._episodes[session] = str(seed).encode()
            self.most_open = max(self.most_open, len(self._episodes))
            self.fields[session] = fields
        return self._answer(session, 0, token_ids)

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        return self._answer(session, turn, token_ids)

    def resume(
        self,
        session: str,
        seed: int,
        fields: str,
        token_ids: IntArray,
        turns: Sequence[IntArray],
        replies: Sequence[EnvironmentReply],
    ) -> EnvironmentReply:
        """Repeat the calls, without waits and failures, as an environment without snapshots."""
        calls, self.calls = self.calls, []
        wait, self._wait = self._wait, lambda session, turn: None
        fail, self._fail = self._fail, lambda session, turn: None
        try:
            again = [self.reset(session, seed, fields, token_ids)]
            again += [self.step(session, number, ids) for number, ids in enumerate(turns, 1)]
        finally:
            self.calls, self._wait, self._fail = calls, wait, fail
        self.resumed.append(Call(session, len(turns), ()))
        if not all(reply.same_answer(other) for reply, other in zip(again, replies, strict=True)):
            raise EpisodeDiffers("other answers")
        return replies[-1]

    def end(self, session: str) -> None:
        with self._lock:
            self._episodes.pop(session, None)

    def _answer(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        with self._lock:
            self.calls.append(Call(session, turn, tuple(token_ids.tolist())))
            state = hashlib.sha256(self._episodes[session] + token_ids.tobytes()).digest()
            self._episodes[session] = state
        self._wait(session, turn)
        if (failure := self._fail(session, turn)) is not None:
            return failure
        count = self._tokens if self._tokens is not None else 1 + state[0] % 3
        if turn == 0 and not self._first_observation:
            count = 0
        observation = np.frombuffer((state * 8)[:count], np.uint8).astype(np.int32) % (tiny.VOCABULARY - 2) + 2
        done = turn > 0 and turn >= (self._turns or 2 + state[1] % 3)
        return EnvironmentReply(observation, state[2] / 256 if turn else 0.0, done)


class ForgetfulEnvironment(EchoEnvironment):
    """The same environment, but every second turn is followed by a new branch: the prompt, the first tokens of the turn, and what
    would have been the observation. ``bare``: without the prompt.
    """

    def __init__(self, bare: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self._bare = bare
        self._prompts: dict[str, IntArray] = {}

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        with self._lock:
            self._prompts[session] = token_ids
        return super().reset(session, seed, fields, token_ids)

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        reply = super().step(session, turn, token_ids)
        if reply.done or turn % 2:
            return reply
        prompt = np.concatenate([self._prompts[session][: 0 if self._bare else None], token_ids[:2], reply.observation])
        return replace(reply, observation=reply.observation[:0], prompt=prompt)


def failure(outcome: Outcome = Outcome.ENVIRONMENT_ERROR) -> EnvironmentReply:
    """Return the reply of an environment that failed."""
    return EnvironmentReply.failed(outcome, "the dice are lost")
