"""Checks of the calls of an environment: invalid requests, errors, deadlines, cancellation, and many calls at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from quartet.conformance.batch_checks import LARGE_MESSAGE, LIMITS, TENSOR, require_idle, require_quick_status
from quartet.conformance.batches import padded, tensor
from quartet.conformance.environment_sessions import Sessions, require_same
from quartet.conformance.outcome import Violation, expect
from quartet.conformance.target import ERRORS, Refusal, require_class, require_garbage_refused, require_text

ENVIRONMENT = "proto/quartet/v1/environment.proto"
SESSIONS = f"{ENVIRONMENT}: EnvironmentService"
CONCURRENT_SESSIONS = 8


def _concurrent(sessions: Sessions) -> None:
    target, seeds = sessions.target, range(1, CONCURRENT_SESSIONS + 1)
    (turn,) = sessions.turns(3)
    expected = {seed: sessions.episode(sessions.name(), [turn], seed) for seed in seeds}
    names = {seed: sessions.name() for seed in seeds}
    for is_first in (True, False):
        method = target.stub.Reset if is_first else target.stub.Step
        calls = {}
        for seed, session in names.items():
            reset, step = sessions.reset_request(session, seed), sessions.step_request(session, 1, turn)
            calls[seed] = target.start(method, reset if is_first else step)
        for seed, call in calls.items():
            try:
                reply = sessions.played(call.result(), is_first)
            except grpc.RpcError as error:
                raise Violation(f"one of {len(calls)} calls at once failed with {Refusal.of(error)}") from None
            require_same([expected[seed][not is_first]], [reply], "a call among others at once, and without them")


def _given_up(after: str, give_up: Callable[[Sessions, Any, Any], None]) -> Callable[[Sessions], None]:
    """Return a check of calls that the caller gives up and repeats. ``give_up`` starts a call of a method and gives it up."""

    def check(sessions: Sessions) -> None:
        target, session, turns = sessions.target, sessions.name(), sessions.turns(2, 3)
        expected = sessions.episode(sessions.name(), turns)
        give_up(sessions, target.stub.Reset, sessions.reset_request(session))
        try:
            replies = [sessions.reset(session)]
            for number, ids in enumerate(turns[: len(expected) - 1], 1):
                give_up(sessions, target.stub.Step, sessions.step_request(session, number, ids))
                replies.append(sessions.step(session, number, ids))
        except Violation as violation:
            raise Violation(f"after {after}, {violation}") from None
        require_same(expected, replies, f"an episode whose calls are repeated after {after}, and one without")
        require_idle(target, after)

    return check


def _miss_deadline(sessions: Sessions, method: Any, request: Any) -> None:
    for seconds in (0.001, 0.01, 0.1):
        code = sessions.target.start(method, request, seconds).code()
        expect(
            code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.OK),
            f"a call with a deadline of {seconds:g} s ends with {code.name}; expected DEADLINE_EXCEEDED",
        )


def _cancel(sessions: Sessions, method: Any, request: Any) -> None:
    for pause in (0.0, 0.002, 0.02):
        call = sessions.target.start(method, request)
        time.sleep(pause)
        call.cancel()


def _status(sessions: Sessions) -> None:
    target = sessions.target
    calls = [
        target.start(target.stub.Reset, sessions.reset_request(sessions.name())) for _ in range(CONCURRENT_SESSIONS)
    ]
    require_quick_status(target, calls)


def _large_message(sessions: Sessions) -> None:
    target, turns = sessions.target, sessions.turns(2)
    plain = sessions.episode(sessions.name(), turns)
    session = sessions.name()
    requests = [
        (target.stub.Reset, sessions.reset_request(session)),
        (target.stub.Step, sessions.step_request(session, 1, turns[0])),
    ]
    replies = [
        sessions.played(target.call(method, padded(request, LARGE_MESSAGE)), is_first=not number)
        for number, (method, request) in enumerate(requests)
    ]
    require_same(plain, replies, "an episode whose messages have an unknown field, and one without it")


def _garbage(sessions: Sessions) -> None:
    for rpc in ("Reset", "Step"):
        require_garbage_refused(sessions.target, rpc)
    sessions.reset(sessions.name())


def _no_prompt(sessions: Sessions) -> Refusal:
    request = sessions.reset_request(sessions.name(), prompt=())
    return sessions.refused(sessions.target.stub.Reset, request, "an empty prompt")


def _refuses(message: Any, what: str) -> Callable[[Sessions], None]:
    """Return a check that Reset and Step refuse these token ids, and that the session continues."""

    def check(sessions: Sessions) -> None:
        stub, session = sessions.target.stub, sessions.name()
        (turn,) = sessions.turns(2)
        expected = sessions.episode(sessions.name(), [turn])
        reset = sessions.reset_request(session)
        reset.token_ids.CopyFrom(message)
        sessions.refused(stub.Reset, reset, f"a prompt with {what}")
        replies = [sessions.reset(session)]
        step = sessions.step_request(session, 1, turn)
        step.token_ids.CopyFrom(message)
        sessions.refused(stub.Step, step, f"a turn with {what}")
        replies.append(sessions.step(session, 1, turn))
        require_same(expected, replies, f"an episode after a refusal of {what}, and one without it")

    return check


def _malformed() -> list[tuple[str, str, str, Callable[[Sessions], None]]]:
    cut, matrix = tensor([1, 2]), tensor([1, 2])
    cut.data = cut.data[:-2]
    matrix.shape[:] = [1, 2]
    invalid = "is INVALID_ARGUMENT, and changes nothing"
    return [
        ("session.refuses_no_tokens", f"A prompt or turn without tokens {invalid}.", ENVIRONMENT,
         _refuses(tensor(np.zeros(0, np.int32)), "no tokens")),
        ("session.refuses_negative_token", f"A negative token id {invalid}.", ENVIRONMENT,
         _refuses(tensor([1, -1]), "a negative token id")),
        ("session.refuses_cut_data", f"A tensor whose data does not fit its shape {invalid}.", TENSOR,
         _refuses(cut, "a tensor without its last bytes")),
        ("session.refuses_floats", f"A tensor of token ids that is not int32 {invalid}.", TENSOR,
         _refuses(tensor(np.ones(2, np.float32)), "float32 token ids")),
        ("session.refuses_matrix", f"A tensor of token ids with two dimensions {invalid}.", TENSOR,
         _refuses(matrix, "a matrix of token ids")),
    ]  # fmt: skip


CALL_CHECKS: list[tuple[str, str, str, Callable[[Sessions], None]]] = [
    *_malformed(),
    ("session.concurrent", f"{CONCURRENT_SESSIONS} calls at once each get their own answer.", LIMITS, _concurrent),
    (
        "session.error_class",
        "The class of an error in google.rpc.ErrorInfo is of the domain quartet, and fits the status code.",
        ERRORS,
        lambda sessions: require_class(_no_prompt(sessions)),
    ),
    (
        "session.error_text",
        "The text of an error is one line that is not too long.",
        ERRORS,
        lambda sessions: require_text(_no_prompt(sessions)),
    ),
    (
        "session.garbage",
        "A request that is not the message fails, and the service continues.",
        "docs/threat-model.md",
        _garbage,
    ),
    (
        "session.deadline",
        "A call whose deadline has passed may be repeated, and has its effect once.",
        SESSIONS,
        _given_up("calls whose deadline has passed", _miss_deadline),
    ),
    (
        "session.cancel",
        "A cancelled call may be repeated, and has its effect once.",
        SESSIONS,
        _given_up("cancelled calls", _cancel),
    ),
    ("session.status", "GetStatus answers at once, also during other calls.", "proto/quartet/v1/status.proto", _status),
    (
        "session.large_message",
        f"A message of {LARGE_MESSAGE // 1024**2} MiB is accepted, and unknown fields are ignored.",
        LIMITS,
        _large_message,
    ),
]
"""Id, requirement, source and code of each check."""
