"""Episodes of an environment under test: sessions with new names, and replies that fit the contract."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet.conformance.batches import tensor, token_ids
from quartet.conformance.check import within
from quartet.conformance.outcome import Skipped, Violation, expect
from quartet.conformance.target import Refusal, Target
from quartet.v1 import environment_pb2, trajectory_pb2

MAX_DETAIL = 1024
"""Maximum characters of the cause of a failure."""
MAX_STATE = 2**20
"""Maximum characters of the state of a session."""
MAX_TURNS = 64
"""Maximum turns of an episode that is played to its end."""

Turn = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of an environment that is OK: observation, reward and done; or a ``failure``, the name of another outcome.

    ``prompt``: that of the branch that the next turn begins; empty if it continues.
    """

    observation: tuple[int, ...]
    reward: float
    done: bool
    failure: str = ""
    detail: str = ""
    state: str = ""
    prompt: tuple[int, ...] = ()


def read_reply(response: Any, target: Target, is_first: bool) -> Reply:
    """Return the reply of a response. ``is_first``: that of Reset. Raises Violation if it contradicts itself or the contract."""
    reply = response.reply
    outcomes = trajectory_pb2.Outcome
    expect(
        reply.outcome in outcomes.values() and reply.outcome != trajectory_pb2.OUTCOME_UNSPECIFIED,
        f"outcome is {reply.outcome}; expected a number of Outcome, but not OUTCOME_UNSPECIFIED",
    )
    name = outcomes.Name(reply.outcome)
    ids = token_ids(reply.observation, "observation", target.vocabulary_size)
    prompt = ids[:0]
    if reply.HasField("prompt"):
        prompt = token_ids(reply.prompt, "prompt", target.vocabulary_size)
        expect(len(prompt) > 0, "prompt has no tokens; leave it out if the next turn continues")
        expect(not len(ids), f"observation has {len(ids)} tokens beside a prompt; expected none")
        expect(not is_first, "prompt is set in the answer to Reset, or to RestoreSession; expected none")
        expect(not reply.done, "prompt is set in a reply that is done; expected none at the end")
    expect(len(reply.state) <= MAX_STATE, f"state has {len(reply.state)} characters; expected at most {MAX_STATE}")
    expect(not (reply.state and reply.done), "state is set in a reply that is done; expected none at the end")
    expect(len(reply.detail) <= MAX_DETAIL, f"detail has {len(reply.detail)} characters; expected at most {MAX_DETAIL}")
    if reply.outcome != trajectory_pb2.OUTCOME_OK:
        expect(
            math.isnan(reply.reward), f"reward is {reply.reward:g} with {name}; expected NaN: a failure is not a number"
        )
        expect(not len(ids), f"observation has {len(ids)} tokens with {name}; expected none")
        expect(reply.done, f"done is not set with {name}; expected the end of the episode")
        return Reply((), math.nan, True, name, reply.detail)
    expect(math.isfinite(reply.reward), f"reward is {reply.reward:g} with {name}; expected a finite number")
    expect(not reply.detail, f"detail is {reply.detail[:100]!r} with {name}; expected no text")
    if is_first:
        expect(reply.reward == 0, f"reward of Reset is {reply.reward:g}; expected 0")
        expect(not reply.done, "done is set in the answer to Reset; expected at least one turn")
    return Reply(tuple(ids.tolist()), reply.reward, reply.done, state=reply.state, prompt=tuple(prompt.tolist()))


class Sessions:
    """Sessions of one check. Their names are new, so that nothing remains of an earlier run of the check."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._run = f"conformance-{secrets.token_hex(4)}"
        self.names: list[str] = []

    def name(self, length: int = 0) -> str:
        """Return the name of a new session, with this number of characters if it is not 0."""
        number = len(self.names)
        name = f"{self._run}/1/{number}/0/1"
        if length:
            name = f"{name}/{'x' * (length - len(name) - 1)}"
        self.names.append(name)
        return name

    def reset_request(
        self, session: str, seed: int = 1, prompt: Sequence[int] = (1, 0, 1), fields: str | None = None
    ) -> Any:
        """Return a request that starts an episode, with the fields of the target unless others are given."""
        given = self.target.limits.fields or "" if fields is None else fields
        return environment_pb2.ResetRequest(
            session=session, seed=seed, fields=given, token_ids=tensor(np.array(prompt, np.int32))
        )

    def step_request(self, session: str, turn: int, ids: Turn) -> Any:
        """Return a request with a turn of the policy."""
        return environment_pb2.StepRequest(session=session, turn=turn, token_ids=tensor(ids))

    def restore_request(self, session: str, turn: int, state: str, seed: int = 1) -> Any:
        """Return a request that continues the episode of ``reset_request`` after a turn."""
        reset = self.reset_request(session, seed)
        return environment_pb2.RestoreSessionRequest(
            session=session, seed=seed, fields=reset.fields, token_ids=reset.token_ids, turn=turn, state=state
        )

    def restore(self, session: str, turn: int, state: str) -> None:
        """Continue an episode after a turn. Raises Violation, and Skipped if the environment fails."""
        request = self.restore_request(session, turn, state)
        reply = self.played(self.target.call(self.target.stub.RestoreSession, request), is_first=True)
        expect(
            not reply.observation, f"observation of RestoreSession has {len(reply.observation)} tokens; expected none"
        )

    def reset(self, session: str, seed: int = 1, **named: Any) -> Reply:
        """Start an episode. Raises Violation, and Skipped if the environment fails."""
        request = self.reset_request(session, seed, **named)
        return self.played(self.target.call(self.target.stub.Reset, request), is_first=True)

    def step(self, session: str, turn: int, ids: Turn) -> Reply:
        """Give a turn to the environment. Raises Violation, and Skipped if the environment fails."""
        return self.played(self.target.call(self.target.stub.Step, self.step_request(session, turn, ids)))

    def played(self, response: Any, is_first: bool = False) -> Reply:
        """Return the reply of a response. Raises Violation, and Skipped if the environment failed."""
        reply = read_reply(response, self.target, is_first)
        if reply.failure:
            raise Skipped(
                f"the environment fails: {reply.failure}, {reply.detail[:200] or 'no detail'}; give --fields if it needs them"
            )
        return reply

    def turns(self, *lengths: int) -> list[Turn]:
        """Return random turns of these lengths. They repeat from run to run."""
        return [self.target.tokens(length) for length in lengths]

    def episode(self, session: str, turns: Sequence[Turn], seed: int = 1) -> list[Reply]:
        """Play an episode until it is over or there is no further turn. Return the replies, that of Reset first."""
        replies = [self.reset(session, seed)]
        for number, ids in enumerate(turns, 1):
            if replies[-1].done:
                break
            replies.append(self.step(session, number, ids))
        return replies

    def ended(self, session: str) -> tuple[int, Turn, Reply]:
        """Play a session to its end. Return the last turn's number, its ids and the reply. Raises Skipped if it does not end."""
        self.reset(session)
        for number in range(1, MAX_TURNS + 1):
            (ids,) = self.turns(1 + number % 3)
            if (reply := self.step(session, number, ids)).done:
                return number, ids, reply
        raise Skipped(f"no episode of random turns ended within {MAX_TURNS} turns")

    def close(self, session: str) -> None:
        """End a session."""
        self.target.call(self.target.stub.CloseSession, environment_pb2.CloseSessionRequest(session=session))

    def refused(self, method: Any, request: Any, what: str) -> Refusal:
        """Return the error of a call that must be INVALID_ARGUMENT. Raises Violation."""
        return self._refused(method, request, what, grpc.StatusCode.INVALID_ARGUMENT)

    def lost(self, session: str, what: str) -> Refusal:
        """Return the error of a turn of an unknown session. Raises Violation."""
        request = self.step_request(session, 1, np.array([1], np.int32))
        return self._refused(self.target.stub.Step, request, what, grpc.StatusCode.FAILED_PRECONDITION)

    def _refused(self, method: Any, request: Any, what: str, code: grpc.StatusCode) -> Refusal:
        try:
            refusal = self.target.refusal(method, request)
        except Violation as violation:
            raise Violation(f"{what}: {violation}; expected {code.name}") from None
        expect(refusal.code is code, f"{what} is refused with {refusal}; expected {code.name}")
        return refusal


def in_sessions(check: Callable[[Sessions], None]) -> Callable[[Target], None]:
    """Return a check of a target whose sessions are closed at the end."""
    return within(_sessions, check)


@contextmanager
def _sessions(target: Target) -> Iterator[Sessions]:
    sessions = Sessions(target)
    try:
        yield sessions
    finally:
        for name in sessions.names:
            with suppress(Violation):
                sessions.close(name)


def require_same(first: Sequence[Reply], second: Sequence[Reply], what: str) -> None:
    """Raise Violation unless two episodes have the same replies. ``what`` says which ones they are."""
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        place = f"turn {turn}" if turn else "Reset"
        expect(one.observation == other.observation, f"{what}: the observations of {place} differ")
        expect(one.prompt == other.prompt, f"{what}: the prompts of {place} differ")
        expect(one.reward == other.reward, f"{what}: the rewards of {place} are {one.reward:g} and {other.reward:g}")
        expect(one.done == other.done, f"{what}: the episode is over after {place} only once")
    expect(len(first) == len(second), f"{what}: they have {len(first) - 1} and {len(second) - 1} turns")
