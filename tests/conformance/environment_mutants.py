"""Mutants of an environment service: its faults, and the check that must fail for each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from quartet.conformance.batches import tensor
from quartet.contract.trajectory import EnvironmentReply
from quartet.errors import FailedPrecondition, InvalidRequest, QuartetError, ServiceFailed
from quartet.v1 import tensor_pb2, trajectory_pb2
from tests.conformance.environments import LAST_TURN, VOCABULARY, Episode, TinyEnvironment
from tests.conformance.faults import Misnamed, health, model, response, status
from tests.conformance.models import Service

Mutation = Callable[[Service], None]
"""A change of a service before it is served."""


def reply(change: Callable[[Any], None], *methods: str) -> Mutation:
    """Return a mutation of the replies of Reset and Step, or of the ``methods``."""

    def mutate(service: Service) -> None:
        for method in methods or ("Reset", "Step"):
            response(method, lambda answer: change(answer.reply))(service)

    return mutate


def field(**values: Any) -> Callable[[Any], None]:
    """Return a change of the fields of a reply."""

    def change(answer: Any) -> None:
        for name, value in values.items():
            setattr(answer, name, value)

    return change


def on_failure(change: Callable[[Any], None]) -> Mutation:
    """Return a mutation of the replies of an environment that has failed."""
    return reply(lambda answer: change(answer) if answer.outcome != trajectory_pb2.OUTCOME_OK else None)


def as_ok(answer: Any) -> None:
    answer.outcome, answer.reward, answer.detail, answer.done = trajectory_pb2.OUTCOME_OK, 0.0, "", False


def observation(ids: list[int]) -> Callable[[Any], None]:
    """Return a change of the observation."""

    def change(answer: Any) -> None:
        answer.observation.data, answer.observation.shape[:] = np.array(ids, "<i4").tobytes(), [len(ids)]

    return change


def prompt(ids: list[int], first: bool = False, beside: bool = False) -> Mutation:
    """Return a mutation of replies that begin a branch, or with ``first`` of Reset: its prompt. ``beside`` an observation."""

    def change(answer: Any) -> None:
        if first or answer.HasField("prompt"):
            answer.prompt.CopyFrom(tensor(np.array(ids, np.int32)))
            if beside:
                answer.observation.CopyFrom(tensor(np.array([1], np.int32)))

    return reply(change, "Reset" if first else "Step")


def short_data(answer: Any) -> None:
    answer.observation.data = answer.observation.data[:-4]


def accepts_tokens(condition: Callable[[Any], bool]) -> Mutation:
    """Return a mutation that replaces invalid token ids of this condition by a valid one."""

    def mutate(service: Service) -> None:
        for method in ("Reset", "Step"):
            right = getattr(service.servicer, method)

            def wrong(message: Any, context: Any, right: Any = right) -> Any:
                if condition(message.token_ids):
                    message.token_ids.dtype, message.token_ids.shape[:] = tensor_pb2.DATA_TYPE_INT32, [1]
                    message.token_ids.data = np.int32(1).tobytes()
                return right(message, context)

            setattr(service.servicer, method, wrong)

    return mutate


def ids_of(tensor: Any) -> Any:
    return np.frombuffer(tensor.data[: len(tensor.data) // 4 * 4], "<i4")


def refuses_tokens(condition: Callable[[Any], bool], error: type[QuartetError] = InvalidRequest) -> Mutation:
    """Return a mutation that refuses valid token ids of this condition."""

    def mutate(service: Service) -> None:
        for method in ("Reset", "Step"):
            right = getattr(service.servicer, method)

            def wrong(message: Any, context: Any, right: Any = right) -> Any:
                if condition(message.token_ids):
                    raise error("no")
                return right(message, context)

            setattr(service.servicer, method, wrong)

    return mutate


def seed_bits(change: Callable[[int], Any]) -> Mutation:
    return model("answer", lambda _, right, seed, turn, total: right(change(seed), turn, total))


def shared_total(service: Service) -> None:
    """Add the turns of all sessions to one sum."""
    total = itertools.count()
    model("answer", lambda _, right, seed, turn, __: right(seed, turn, next(total) if turn else 0))(service)


def last_session_only(service: Service) -> None:
    """Keep the state of an episode in one place, as a module variable would."""
    current: list[Episode] = []

    def find(_: TinyEnvironment, right: Any, session: str) -> Episode:
        right(session)
        return current[-1]

    def opened(_: TinyEnvironment, right: Any, session: str, episode: Episode) -> Episode:
        current.append(right(session, episode))
        return current[-1]

    model("find", find)(service)
    model("open", opened)(service)


def lost_with_another(service: Service) -> None:
    """Close every session when one is closed."""
    model("close_session", lambda tiny, right, session: (right(session), tiny.sessions.clear()))(service)


def refuses_unknown_close(tiny: TinyEnvironment, right: Any, session: str) -> None:
    tiny.find(session)
    right(session)


def unknown_is_new(tiny: TinyEnvironment, right: Any, session: str) -> Episode:
    """Start an unknown session in the middle of an episode."""
    if session not in tiny.sessions:
        tiny.sessions[session] = Episode(0, (), tiny.answer(0, 0, 0))
    return right(session)  # type: ignore[no-any-return]


def plain_precondition(tiny: TinyEnvironment, _: Any, session: str) -> Episode:
    if session not in tiny.sessions:
        raise FailedPrecondition("unknown session")
    return tiny.sessions[session]


def short_names(service: Service) -> None:
    """Keep the first 255 characters of a name."""
    for method in ("reset", "step", "close_session"):
        model(method, lambda _, right, session, *rest: right(session[:255], *rest))(service)


def effect_of_repetition(tiny: TinyEnvironment, right: Any, episode: Episode, request: tuple[Any, ...]) -> bool:
    """Answer a repeated turn as before, and let it change the state."""
    if repeated := right(episode, request):
        episode.total += 1
    return bool(repeated)


def repeats_reset_only(tiny: TinyEnvironment, right: Any, episode: Episode, request: tuple[Any, ...]) -> bool:
    return request[0] == "reset" and bool(right(episode, request))


def repeats_by_number(tiny: TinyEnvironment, right: Any, episode: Episode, request: tuple[Any, ...]) -> bool:
    """Take another turn with the last number for its repetition."""
    return request[:2] == episode.request[:2] if request[0] == "step" else bool(right(episode, request))


def any_turn(tiny: TinyEnvironment, _: Any, episode: Episode, turn: int) -> None:
    if episode.reply.done:
        raise InvalidRequest("over")


def after_end(tiny: TinyEnvironment, right: Any, episode: Episode, turn: int) -> None:
    if not episode.reply.done:
        right(episode, turn)


def counts_refused(tiny: TinyEnvironment, right: Any, episode: Episode, turn: int) -> None:
    """Let a refused turn change the state."""
    try:
        right(episode, turn)
    except InvalidRequest:
        episode.total += 5
        raise


def continued(tiny: TinyEnvironment, right: Any, session: str, seed: int, fields: str, ids: Any) -> EnvironmentReply:
    """Answer another Reset of an open session with its last reply."""
    with tiny.lock:
        if (episode := tiny.sessions.get(session)) is not None and episode.turn:
            return replace(episode.reply, reward=0.0, done=False)
    return right(session, seed, fields, ids)  # type: ignore[no-any-return]


def restarts_with_other_draws(service: Service) -> None:
    """Answer every Reset of a session with other random numbers."""
    numbers = itertools.count()
    model("repeats", lambda _, right, episode, request: request[0] == "step" and right(episode, request))(service)
    model("answer", lambda _, right, seed, turn, total: right(seed, turn, total + next(numbers)))(service)


def unseeded(service: Service) -> None:
    numbers = itertools.count(100)
    model("reset", lambda _, right, session, seed, *rest: right(session, next(numbers), *rest))(service)


def small_seeds(_: TinyEnvironment, right: Any, session: str, seed: int, *rest: Any) -> EnvironmentReply:
    if seed >= 2**62:
        raise InvalidRequest(f"seed {seed}: expected less than 2^62")
    return right(session, seed, *rest)  # type: ignore[no-any-return]


def not_json(tiny: TinyEnvironment, right: Any, fields: str) -> Any:
    try:
        return right(fields)
    except InvalidRequest:
        return {}


def no_room(error: type[QuartetError], limit: int) -> Mutation:
    def opened(tiny: TinyEnvironment, right: Any, session: str, episode: Episode) -> Episode:
        if len(tiny.sessions) >= limit:
            raise error("full")
        return right(session, episode)  # type: ignore[no-any-return]

    return model("open", opened)


def keeps_open(tiny: TinyEnvironment, right: Any, session: str, episode: Episode) -> Episode:
    """Keep the episode that a restored one must replace."""
    if session in tiny.sessions and not episode.request:
        return tiny.sessions[session]
    return right(session, episode)  # type: ignore[no-any-return]


def loses_oldest(tiny: TinyEnvironment, right: Any, session: str, episode: Episode) -> Episode:
    """Make room by closing an open session."""
    if len(tiny.sessions) >= 20:
        tiny.sessions.pop(next(iter(tiny.sessions)))
    return right(session, episode)  # type: ignore[no-any-return]


def never_ends_twice(service: Service) -> None:
    """Forget a session at its end."""

    def step(tiny: TinyEnvironment, right: Any, session: str, *rest: Any) -> EnvironmentReply:
        answer: EnvironmentReply = right(session, *rest)
        if answer.done:
            tiny.close_session(session)
        return answer

    model("step", step)(service)


def forgets_given_up(service: Service) -> None:
    """Take a turn again if the call before had a short deadline."""
    right = service.servicer.Step

    def wrong(message: Any, context: Any) -> Any:
        answer = right(message, context)
        if context.time_remaining() < 1:
            service.model.find(message.session).request = ()
            service.model.find(message.session).turn -= 1
        return answer

    service.servicer.Step = wrong


def closes_given_up(service: Service) -> None:
    """Close the session of a call that is cancelled."""
    right = service.servicer.Step

    def wrong(message: Any, context: Any) -> Any:
        answer = right(message, context)
        end = time.monotonic() + 0.2
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.005)
        if not context.is_active():
            service.model.close_session(message.session)
        return answer

    service.servicer.Step = wrong


def mixed_answers(service: Service) -> None:
    """Keep the request of a call in a field, where the next call overwrites it."""
    right = service.servicer.Step
    current: dict[str, Any] = {}

    def wrong(message: Any, context: Any) -> Any:
        current["message"] = message
        time.sleep(0.05)
        return right(current["message"], context)

    service.servicer.Step = wrong


def one_call(service: Service) -> None:
    """Refuse a call during another one."""
    right, busy = service.servicer.Reset, threading.Lock()

    def wrong(message: Any, context: Any) -> Any:
        if not busy.acquire(blocking=False):
            raise ServiceFailed("busy")
        try:
            time.sleep(0.05)
            return right(message, context)
        finally:
            busy.release()

    service.servicer.Reset = wrong


def slow_status(service: Service) -> None:
    """Answer a status only when no call has run for a while."""
    last = [0.0]

    def reset(_: Any, right: Any, *arguments: Any) -> EnvironmentReply:
        last[0] = time.monotonic()
        time.sleep(0.05)
        return right(*arguments)  # type: ignore[no-any-return]

    right = service.servicer.status

    def wrong() -> Any:
        if time.monotonic() - last[0] < 0.2:
            time.sleep(1.2)
        return right()

    model("reset", reset)(service)
    service.servicer.status = wrong


def small_messages(service: Service) -> None:
    right = service.servicer.Reset

    def wrong(message: Any, context: Any) -> Any:
        if message.ByteSize() > 4 * 1024 * 1024:
            raise InvalidRequest("message larger than 4 MiB")
        return right(message, context)

    service.servicer.Reset = wrong


def long_text(error: type[QuartetError], text: str) -> Mutation:
    def mutate(service: Service) -> None:
        right = service.servicer.Reset

        def wrong(message: Any, context: Any) -> Any:
            if not message.token_ids.data:
                raise error(text)
            return right(message, context)

        service.servicer.Reset = wrong

    return mutate


def busy(service: Service) -> None:
    """Count calls as pending for ever."""
    status(work_pending=1)(service)


ENVIRONMENT_MUTANTS: list[tuple[str, str, Mutation]] = [
    ("an environment that does not serve", "health.service", health("quartet.v1.EnvironmentService", 2)),
    ("an observation without its last bytes", "reset.reply", reply(short_data, "Reset")),
    ("a reward for Reset", "reset.reply", reply(field(reward=0.5), "Reset")),
    ("an episode that is over before the first turn", "reset.reply", reply(field(done=True), "Reset")),
    ("an unknown token in the observation", "step.reply", reply(observation([1, VOCABULARY]), "Step")),
    ("a negative token in the observation", "step.reply", reply(observation([-1]), "Step")),
    ("no outcome", "step.reply", reply(field(outcome=0), "Step")),
    ("an infinite reward", "step.reply", reply(field(reward=float("inf")), "Step")),
    ("an unknown token in the prompt of a branch", "step.branches", prompt([1, VOCABULARY])),
    ("a branch without a prompt", "step.branches", prompt([])),
    ("an observation beside the prompt of a branch", "step.branches", prompt([1], beside=True)),
    ("a branch before the first turn", "reset.reply", prompt([1], first=True)),
    ("NaN without a failure", "step.outcomes", reply(field(reward=float("nan")), "Step")),
    ("a reward of 0 for a failure", "step.failure", on_failure(field(reward=0.0))),
    ("a failure as an answer", "step.failure", on_failure(as_ok)),
    ("an observation of a failure", "step.failure", on_failure(observation([1]))),
    ("a failure that is not the end", "step.failure", on_failure(field(done=False))),
    ("turns after a failure", "step.failure", model("check_turn", after_end)),
    ("another answer to a repeated Reset", "reset.repeated", restarts_with_other_draws),
    ("an open session that does not start again", "reset.again", model("reset", continued)),
    ("32 bits of the seed", "reset.seeds", seed_bits(lambda seed: seed % 2**32)),
    ("a seed as a double", "reset.seeds", seed_bits(float)),
    ("seeds above 2^62 refused", "reset.seed_range", model("reset", small_seeds)),
    ("fields that are no JSON", "reset.fields", model("parse", not_json)),
    ("the effect of a repeated turn", "step.repeated", model("repeats", effect_of_repetition)),
    ("a repeated turn refused", "step.repeated", model("repeats", repeats_reset_only)),
    ("any number of a turn", "step.order", model("check_turn", any_turn)),
    ("another turn as a repetition", "step.order", model("repeats", repeats_by_number)),
    ("the effect of a refused turn", "step.order", model("check_turn", counts_refused)),
    ("turns after the end", "step.after_end", model("check_turn", after_end)),
    ("a session forgotten at its end", "step.after_end", never_ends_twice),
    ("long turns refused", "step.long", refuses_tokens(lambda tensor: len(ids_of(tensor)) > 256)),
    ("tokens without text refused", "step.embedded_only",
     refuses_tokens(lambda tensor: bool((ids_of(tensor) >= VOCABULARY).any()))),
    ("unknown sessions as new ones", "step.unknown_session", model("find", unknown_is_new)),
    ("an unknown session without its reason", "step.unknown_session", model("find", plain_precondition)),
    ("turns that go to another session", "session.isolated", last_session_only),
    ("state that sessions share", "session.isolated", shared_total),
    ("random numbers without the seed", "session.repeatable", unseeded),
    ("a state without the turns", "session.restored", model("state", lambda *_: "5")),
    ("a restored session that begins with its first turn", "session.restored", model("turn_of", lambda *_: 0)),
    ("a restored session under a name that is taken", "session.restored", model("open", keeps_open)),
    ("a state at the end", "step.reply", reply(lambda answer: setattr(answer, "state", "1"), "Step")),
    ("names that are cut", "session.names", short_names),
    ("a closed session that continues", "session.close", model("close_session", lambda *_: None)),
    ("other sessions closed, too", "session.close", lost_with_another),
    ("an error for closing twice", "session.close_unknown", model("close_session", refuses_unknown_close)),
    ("INTERNAL without room", "session.room", no_room(ServiceFailed, 20)),
    ("no room after sessions are closed", "session.room", model("close_session", lambda *_: None)),
    ("an open session closed to make room", "session.room", model("open", loses_oldest)),
    ("answers of another call", "session.concurrent", mixed_answers),
    ("one call at a time", "session.concurrent", one_call),
    ("no tokens accepted", "session.refuses_no_tokens", accepts_tokens(lambda tensor: not tensor.data)),
    ("negative tokens accepted", "session.refuses_negative_token",
     accepts_tokens(lambda tensor: bool((ids_of(tensor) < 0).any()))),
    ("cut tokens accepted", "session.refuses_cut_data", accepts_tokens(lambda tensor: len(tensor.data) % 4 != 0)),
    ("float tokens accepted", "session.refuses_floats", accepts_tokens(lambda tensor: tensor.dtype == 1)),
    ("a matrix of tokens accepted", "session.refuses_matrix", accepts_tokens(lambda tensor: len(tensor.shape) > 1)),
    ("another class of an error", "session.error_class", long_text(Misnamed, "no")),
    ("an error without a text", "session.error_text", long_text(InvalidRequest, "")),
    ("a turn taken again after a deadline", "session.deadline", forgets_given_up),
    ("a session lost after a cancellation", "session.cancel", closes_given_up),
    ("pending calls of gone callers", "session.deadline", busy),
    ("a status that waits for calls", "session.status", slow_status),
    ("messages over 4 MiB refused", "session.large_message", small_messages),
]  # fmt: skip
"""Name, id of the check that must fail, and fault."""
assert LAST_TURN >= 3, "the faults of turns need several of them"
