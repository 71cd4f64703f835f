"""Checks of an environment: replies, failures, seeds, turns and sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from quartet.conformance.batch_checks import LIMITS
from quartet.conformance.check import Check
from quartet.conformance.environment_call_checks import CALL_CHECKS, ENVIRONMENT, SESSIONS
from quartet.conformance.environment_sessions import Sessions, Turn, in_sessions, read_reply, require_same
from quartet.conformance.outcome import Skipped, expect
from quartet.rpc.status_codes import DOMAIN

REPLY = f"{ENVIRONMENT}: EnvironmentReply"
RESET = f"{ENVIRONMENT}: ResetRequest"
STEP = f"{ENVIRONMENT}: StepRequest"
MANY_SESSIONS = 64
NUM_SEEDS = 32
MAX_SEED = 2**63 - 1


def _first_reply(sessions: Sessions) -> None:
    sessions.reset(sessions.name())


def _reply(sessions: Sessions) -> None:
    for lengths in ((3, 1, 5), (1, 8, 2)):
        sessions.episode(sessions.name(), sessions.turns(*lengths))


def _branches(sessions: Sessions) -> None:
    """Play episodes until a reply has a prompt. Its tokens are checked as it is read."""
    for lengths in ((2, 3, 4), (1, 1, 6), (5, 2, 1)):
        if any(reply.prompt for reply in sessions.episode(sessions.name(), sessions.turns(*lengths))):
            return
    raise Skipped("no turn of these episodes began a branch")


def _outcomes(sessions: Sessions) -> None:
    target = sessions.target
    for number in range(NUM_SEEDS):
        session = sessions.name()
        request = sessions.reset_request(session, seed=number)
        reply = read_reply(target.call(target.stub.Reset, request), target, is_first=True)
        for turn, ids in enumerate(sessions.turns(1 + number % 7, 2), 1):
            if reply.done:
                break
            response = target.call(target.stub.Step, sessions.step_request(session, turn, ids))
            reply = read_reply(response, target, is_first=False)


def _failure(sessions: Sessions) -> None:
    target = sessions.target
    if (fields := target.limits.failing_fields) is None:
        raise Skipped("needs fields with which the environment fails; give --failing-fields")
    session = sessions.name()
    calls = [(target.stub.Reset, sessions.reset_request(session, fields=fields))]
    calls += [
        (target.stub.Step, sessions.step_request(session, turn, ids))
        for turn, ids in enumerate(sessions.turns(2, 3, 4), 1)
    ]
    for number, (method, request) in enumerate(calls):
        if (reply := read_reply(target.call(method, request), target, is_first=not number)).done:
            break
    expect(reply.failure, "no reply has an outcome other than OK with --failing-fields")
    again = read_reply(target.call(method, request), target, is_first=not number)
    expect(again.failure == reply.failure, f"a repeated call that failed has {again.failure or 'OUTCOME_OK'}")
    further = sessions.step_request(session, number + 1, sessions.turns(2)[0])
    sessions.refused(target.stub.Step, further, "a turn after the failure")
    sessions.reset(session)


def _repeated_reset(sessions: Sessions) -> None:
    session, turns = sessions.name(), sessions.turns(2, 3)
    expected = sessions.episode(sessions.name(), turns)
    first = [sessions.reset(session) for _ in range(3)]
    for reply in first:
        require_same(expected[:1], [reply], "a repeated Reset")
    replies = [first[0], *_steps(sessions, session, turns, 1)]
    require_same(expected, replies, "an episode after a repeated Reset, and one without the repetition")


def _started_again(sessions: Sessions) -> None:
    session, turns = sessions.name(), sessions.turns(2, 3)
    expected = {seed: sessions.episode(sessions.name(), turns, seed) for seed in (1, 2)}
    for seed in (1, 1, 2, 1):
        replies = sessions.episode(session, turns, seed)
        require_same(expected[seed], replies, f"an episode with the seed {seed} that is started again, and a new one")


def _seeds(sessions: Sessions) -> None:
    """Compare seeds that differ in one high bit, and high seeds that a double cannot tell apart."""
    turns = sessions.turns(2, 1)

    def played(seed: int) -> Any:
        session = sessions.name()
        replies = sessions.episode(session, turns, seed)
        sessions.close(session)
        return replies

    small = [played(seed) for seed in range(NUM_SEEDS)]
    if all(replies == small[0] for replies in small):
        raise Skipped(f"{NUM_SEEDS} episodes with other seeds are equal: the environment does not use them")
    shifted = [played(seed + 2**32) for seed in range(NUM_SEEDS)]
    expect(small != shifted, "seeds that differ by 2^32 give equal episodes; expected all 63 bits to count")
    high = [played(2**62 + seed) for seed in range(NUM_SEEDS)]
    expect(
        any(replies != high[0] for replies in high),
        f"the seeds 2^62 to 2^62+{NUM_SEEDS - 1} give equal episodes; expected all 63 bits to count",
    )


def _seed_range(sessions: Sessions) -> None:
    for seed in (0, MAX_SEED):
        sessions.reset(sessions.name(), seed)
    request = sessions.reset_request(sessions.name(), MAX_SEED + 1)
    sessions.refused(sessions.target.stub.Reset, request, "the seed 2^63")


def _fields(sessions: Sessions) -> None:
    fields = sessions.target.limits.fields or '{"answer": "1", "prompt_set": "ü"}'
    sessions.reset(sessions.name(), fields=fields)
    for wrong in ("{", "[1]", '"text"'):
        request = sessions.reset_request(sessions.name(), fields=wrong)
        sessions.refused(sessions.target.stub.Reset, request, f"the fields {wrong}")


def _repeated_step(sessions: Sessions) -> None:
    session, turns = sessions.name(), sessions.turns(2, 3, 1)
    expected = sessions.episode(sessions.name(), turns)
    replies = [sessions.reset(session)]
    for number, ids in enumerate(turns[: len(expected) - 1], 1):
        replies.append(sessions.step(session, number, ids))
        for _ in range(2):
            require_same(replies[-1:], [sessions.step(session, number, ids)], f"turn {number} and its repetition")
    require_same(expected, replies, "an episode whose turns are repeated, and one without the repetitions")


def _order(sessions: Sessions) -> None:
    session, turns = sessions.name(), sessions.turns(2, 3, 4)
    expected = sessions.episode(sessions.name(), turns)
    replies = [sessions.reset(session)]

    def refuse(number: int, ids: Turn, what: str) -> None:
        sessions.refused(sessions.target.stub.Step, sessions.step_request(session, number, ids), what)

    refuse(0, turns[0], "turn 0")
    refuse(2, turns[0], "turn 2 after Reset")
    for number, ids in enumerate(turns[: len(expected) - 1], 1):
        replies.append(sessions.step(session, number, ids))
        refuse(number, ids[::-1] + 1, f"turn {number} again with other tokens")
        refuse(number + 2, ids, f"turn {number + 2} after turn {number}")
        if number > 1:
            refuse(number - 1, turns[number - 2], f"turn {number - 1} after turn {number}")
    require_same(expected, replies, "an episode with refused turns, and one without them")


def _after_end(sessions: Sessions) -> None:
    session = sessions.name()
    number, ids, reply = sessions.ended(session)
    request = sessions.step_request(session, number + 1, ids)
    sessions.refused(sessions.target.stub.Step, request, "a turn after the end of the episode")
    require_same([reply], [sessions.step(session, number, ids)], "the last turn and its repetition after the end")


def _long(sessions: Sessions) -> None:
    length, session = sessions.target.long_tokens, sessions.name()
    sessions.reset(session, prompt=sessions.turns(length)[0].tolist())
    sessions.step(session, 1, sessions.turns(length)[0])


def _embedded_only(sessions: Sessions) -> None:
    session, above = sessions.name(), sessions.target.vocabulary_size
    sessions.reset(session, prompt=[1, above])
    sessions.step(session, 1, np.array([1, above, above + 63], np.int32))


def _unknown(sessions: Sessions) -> None:
    refusal = sessions.lost(sessions.name(), "a turn of an unknown session")
    shown = (refusal.domain, refusal.reason)
    expect(
        shown == (DOMAIN, "SessionLost"),
        f"its ErrorInfo has domain and reason {shown}; expected {(DOMAIN, 'SessionLost')}: the caller repeats the session then",
    )


def _isolated(sessions: Sessions) -> None:
    turns = {1: sessions.turns(2, 3, 1), 2: sessions.turns(4, 1, 2)}
    expected = {seed: sessions.episode(sessions.name(), turns[seed], seed) for seed in turns}
    names = {seed: sessions.name() for seed in turns}
    replies = {seed: [sessions.reset(names[seed], seed)] for seed in turns}
    for number in range(1, 4):
        for seed in turns:
            if not replies[seed][-1].done:
                replies[seed].append(sessions.step(names[seed], number, turns[seed][number - 1]))
    for seed in turns:
        require_same(expected[seed], replies[seed], "an episode beside another one, and without it")


def _repeatable(sessions: Sessions) -> None:
    turns = sessions.turns(2, 3, 1)
    for seed in (1, 7):
        first, second = (sessions.episode(sessions.name(), turns, seed) for _ in range(2))
        require_same(first, second, f"two episodes with the seed {seed} and the same turns")


def _restored(sessions: Sessions) -> None:
    """Restore a session after each turn, in a new session and in one that has gone on."""
    turns, session = sessions.turns(2, 3, 1), sessions.name()
    expected = sessions.episode(session, turns)
    if not expected[0].state:
        raise Skipped("the reply to Reset has no state: a lost session is repeated from its start")
    for turn, reply in enumerate(expected[:-1]):
        expect(reply.state, f"the reply to turn {turn} has no state, and earlier ones have")
        for name in (sessions.name(), session):
            sessions.restore(name, turn, reply.state)
            if turn:
                again = sessions.step_request(name, turn, turns[turn - 1][::-1] + 1)
                sessions.refused(sessions.target.stub.Step, again, f"turn {turn} after RestoreSession with turn {turn}")
            replies = [reply, *_steps(sessions, name, turns[turn:], turn + 1)]
            require_same(expected[turn:], replies, f"an episode restored after turn {turn}, and without it")
    request = sessions.restore_request(sessions.name(), 0, "")
    sessions.refused(sessions.target.stub.RestoreSession, request, "an empty state")


def _names(sessions: Sessions) -> None:
    stub, turns = sessions.target.stub, sessions.turns(2)
    for name, what in (("", "an empty session name"), ("x" * 513, "a session name of 513 characters")):
        sessions.refused(stub.Reset, sessions.reset_request(name), what)
        sessions.refused(stub.Step, sessions.step_request(name, 1, turns[0]), what)
    longest = sessions.name(512)
    sessions.reset(longest)
    sessions.lost(f"{longest[:-1]}y", "a turn of a session whose name differs in the last of 512 characters")
    sessions.step(longest, 1, turns[0])


def _close(sessions: Sessions) -> None:
    closed, other, turns = sessions.name(), sessions.name(), sessions.turns(2, 3)
    expected = sessions.episode(sessions.name(), turns)
    for session in (closed, other):
        sessions.reset(session)
    sessions.close(closed)
    sessions.lost(closed, "a turn of a closed session")
    require_same(expected[1:], _steps(sessions, other, turns, 1), "an episode after another was closed, and before")
    require_same(expected, sessions.episode(closed, turns), "an episode under the name of a closed one, and a new one")


def _close_unknown(sessions: Sessions) -> None:
    session = sessions.name()
    sessions.close(session)
    sessions.reset(session)
    for _ in range(2):
        sessions.close(session)


def _room(sessions: Sessions) -> None:
    target, opened = sessions.target, list[str]()
    (turn,) = sessions.turns(2)
    for _ in range(MANY_SESSIONS):
        request = sessions.reset_request(session := sessions.name())
        call = target.start(target.stub.Reset, request)
        if (code := call.code()) is grpc.StatusCode.RESOURCE_EXHAUSTED and opened:
            break
        expect(
            code is grpc.StatusCode.OK,
            f"Reset with {len(opened)} open sessions is {code.name}; expected OK, or RESOURCE_EXHAUSTED without room",
        )
        opened.append(session)
    sessions.step(opened[0], 1, turn)
    sessions.step(opened[-1], 1, turn)
    for session in opened:
        sessions.close(session)
    sessions.reset(sessions.name())


def _steps(sessions: Sessions, session: str, turns: list[Turn], first: int) -> list[Any]:
    """Return the replies to turns until the episode is over. ``first`` is the number of the first one."""
    replies: list[Any] = []
    for number, ids in enumerate(turns, first):
        if replies and replies[-1].done:
            break
        replies.append(sessions.step(session, number, ids))
    return replies


_LISTED: list[tuple[str, str, str, Callable[[Sessions], None]]] = [
    (
        "reset.reply",
        "Reset is answered with an observation of known token ids, the reward 0, and not done.",
        REPLY,
        _first_reply,
    ),
    ("reset.repeated", "A repeated Reset gets the same answer and has no effect.", SESSIONS, _repeated_reset),
    ("reset.again", "Another Reset starts the episode of the session again.", SESSIONS, _started_again),
    ("reset.seeds", "All 63 bits of the seed count.", RESET, _seeds),
    ("reset.seed_range", "Seeds are 0 to 2^63-1; another one is INVALID_ARGUMENT.", RESET, _seed_range),
    ("reset.fields", "Fields are a JSON object; others are INVALID_ARGUMENT.", RESET, _fields),
    (
        "step.reply",
        "Step is answered with an observation of known token ids, a finite reward, and whether it is over.",
        REPLY,
        _reply,
    ),
    (
        "step.branches",
        "A reply with the prompt of a branch has known token ids, and no observation.",
        REPLY,
        _branches,
    ),
    (
        "step.outcomes",
        "A reply is OK with a reward, or a failure with NaN, no observation, and done.",
        REPLY,
        _outcomes,
    ),
    ("step.failure", "An environment that fails is an outcome without a reward; the session is over.", REPLY, _failure),
    ("step.repeated", "The repeated last Step gets the same answer and has no effect.", SESSIONS, _repeated_step),
    (
        "step.order",
        "A turn that is not the next or the last one is INVALID_ARGUMENT, and changes nothing.",
        STEP,
        _order,
    ),
    (
        "step.after_end",
        "A turn after the end is INVALID_ARGUMENT; the last one may still be repeated.",
        SESSIONS,
        _after_end,
    ),
    ("step.long", "A prompt and a turn may have 512 tokens.", LIMITS, _long),
    (
        "step.embedded_only",
        "Token ids at or above vocabulary_size are valid: a policy may embed more.",
        RESET,
        _embedded_only,
    ),
    (
        "step.unknown_session",
        "A turn of an unknown session is FAILED_PRECONDITION with the reason SessionLost.",
        SESSIONS,
        _unknown,
    ),
    ("session.isolated", "Sessions do not affect each other.", SESSIONS, _isolated),
    ("session.repeatable", "Equal seeds, fields, prompts and turns give equal answers.", SESSIONS, _repeatable),
    (
        "session.restored",
        "A session whose replies have a state continues from it in any session, without another turn.",
        SESSIONS,
        _restored,
    ),
    ("session.names", "Names have 1 to 512 characters, which all count.", RESET, _names),
    ("session.close", "A closed session is unknown, and its name may be used again.", SESSIONS, _close),
    ("session.close_unknown", "Closing a session that does not exist is no error.", SESSIONS, _close_unknown),
    (
        "session.room",
        "Without room, Reset is RESOURCE_EXHAUSTED; open sessions continue, and closed ones make room.",
        SESSIONS,
        _room,
    ),
]


def environment_checks() -> list[Check]:
    """Return the checks of an environment."""
    listed = [*_LISTED, *CALL_CHECKS]
    return [Check(name, requirement, source, in_sessions(check)) for name, requirement, source, check in listed]
