"""Environments of a user's class in worker processes, by session. Imports no torch.

Each worker process has the environments of many sessions and makes one call at a time: most environments answer within
microseconds, and a process for each of a thousand sessions would cost more than all of them. A call that takes too long ends its
worker. The other sessions of that worker are lost with it, and their callers repeat them (see ``EnvironmentService``).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from quartet.codec.environment import MAX_STATE_CHARACTERS
from quartet.config.environment import EnvironmentConfig
from quartet.contract.arrays import IntArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.data.chat_template import NO_INPUTS, TemplateInputs
from quartet.environments.host_child import Answer
from quartet.environments.observations import (
    Continuation,
    Conversation,
    ObservationEncoders,
    TurnDecoder,
    UnusableObservation,
)
from quartet.errors import ConfigError, FunctionFailed, InvalidRequest, ServiceBusy, SessionLost
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.rewards.reward_source import parse_fields
from quartet.system.failpoints import failpoint
from quartet.system.user_function import START_TIMEOUT, FunctionWorker

log = structlog.get_logger()

HOSTING = "quartet.environments.host_child:call"
"""Function that a worker process calls."""
MAX_CALLS = 48
"""Maximum calls at once, so that health and status always find a free thread."""
NOTHING: IntArray = np.zeros(0, np.int32)
"""No observation."""
CLOSE_TIMEOUT = 10.0
"""Time limit of a call that closes an environment, in seconds. The worker interrupts the close method much earlier, if it can."""


class EnvironmentHost:
    """The sessions of one environment class. Thread-safe."""

    def __init__(
        self,
        config: EnvironmentConfig,
        model: str,
        clock: Callable[[], float] = time.monotonic,
        inputs: TemplateInputs = NO_INPUTS,
    ) -> None:
        """Load the tokenizer of ``model`` and start the workers. ``clock`` measures idle time, in seconds.

        ``inputs`` are what the chat template gets, unless a prompt has others.

        Raises ModelError; ConfigError if the class cannot be used. After an error no process is left.
        """
        if config.class_name is None:
            raise ConfigError("environment.class_name: missing; name the class of the environment")
        self._config, self._class, self._clock = config, config.class_name, clock
        tokenizer = load_tokenizer(model)
        template = config.chat_template.read_text(encoding="utf-8") if config.chat_template is not None else None
        self._encoders = ObservationEncoders(tokenizer, model, config.observations, template, inputs)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._number = 0
        self._calls = threading.BoundedSemaphore(MAX_CALLS)
        self._pending = 0
        self._closing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="session-closer")
        self._workers = _start_workers(self._class, config.arguments, config.num_workers)
        self._decoder = TurnDecoder(tokenizer, self._workers[0].keeps_special_tokens)
        self._status = ServiceStatus(
            role=Role.ENVIRONMENT,
            model=self._class,
            device="cpu",
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            vocabulary_size=len(tokenizer),
        )

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        """Start the episode of a session, or start it again. See EnvironmentService. Raises InvalidRequest, ServiceBusy."""
        (values,) = parse_fields([fields] if fields else (), 1)
        request = ("reset", seed, fields, token_ids.tobytes())
        with self._call("reset"):
            own = self._open(session)
            with own.lock:
                own.check_open(session)
                if own.turn == 0 and own.reply is not None and own.request == request:
                    return own.reply
                failpoint("environment.resetting")
                arguments = {"name": self._class, "settings": self._config.arguments, "seed": seed, "fields": values}
                answer = self._ask(session, own, "reset", arguments)
                own.request, own.turn = request, 0

                def encode(observation: Any) -> Continuation:
                    own.conversation = self._encoders.of_prompt(values).begin(token_ids)
                    return own.conversation.first(observation)

                return self._answered(session, own, answer, encode)

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        """Give the policy's turn to the environment. See EnvironmentService.

        Raises SessionLost for an unknown session, InvalidRequest for another turn than the next or the last one.
        """
        request = ("step", turn, token_ids.tobytes())
        with self._call("step"):
            with self._lock:
                own = self._sessions.get(session)
            if own is None:
                raise SessionLost(f"session {session}: unknown; it has expired, or this service was restarted")
            with own.lock:
                own.check_open(session)
                if turn == own.turn and own.request == request and own.reply is not None:
                    return own.reply
                if turn != own.turn + 1 or own.ended:
                    expected = "no further turn, because the episode is over" if own.ended else f"turn {own.turn + 1}"
                    raise InvalidRequest(f"session {session}: got turn {turn}, expected {expected}, or the last call")
                failpoint("environment.stepping")
                answer = self._ask(session, own, "step", {"text": self._decoder.text(token_ids)})
                if answer.get("unknown"):
                    self._forget(session, own)
                    raise SessionLost(f"session {session}: lost, because its worker process was replaced")
                failpoint("environment.stepped")
                own.request, own.turn = request, turn

                def encode(observation: Any) -> Continuation:
                    assert own.conversation is not None, "only an episode that has begun has a next turn"
                    return own.conversation.next(observation, token_ids)

                return self._answered(session, own, answer, encode)

    def restore(
        self, session: str, seed: int, fields: str, token_ids: IntArray, turn: int, state: str
    ) -> EnvironmentReply:
        """Continue an episode after ``turn`` turns in the state of that reply. See EnvironmentService.

        Raises InvalidRequest, ServiceBusy.
        """
        (values,) = parse_fields([fields] if fields else (), 1)
        snapshot, chat = _parts_of(state)
        with self._call("restore"):
            own = self._open(session)
            with own.lock:
                own.check_open(session)
                arguments = {"name": self._class, "settings": self._config.arguments, "seed": seed, "fields": values}
                answer = self._ask(session, own, "restore", {**arguments, "snapshot": snapshot})
                own.request, own.turn = (), turn

                def encode(observation: Any) -> Continuation:
                    own.conversation = self._encoders.of_prompt(values).begin(token_ids, chat)
                    return Continuation(NOTHING)

                return self._answered(session, own, answer, encode)

    def close_session(self, session: str) -> None:
        """End a session. A session that does not exist is not an error."""
        with self._lock:
            own = self._sessions.pop(session, None)
            if own is not None:
                self._discard(own)

    def status(self) -> ServiceStatus:
        """Return the status of the service: the class, the vocabulary, and the load."""
        busy: Counter[str] = Counter()
        for worker in self._workers:
            busy.update(worker.busy_seconds)
        # The mean over the workers: their load is at most 1.
        seconds = {kind: total / len(self._workers) for kind, total in busy.items()}
        with self._lock:
            return replace(
                self._status, busy_seconds=seconds, work_pending=self._pending, open_sessions=len(self._sessions)
            )

    def close(self) -> None:
        """End the worker processes. Running calls fail."""
        self._closing.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    @contextmanager
    def _call(self, method: str) -> Iterator[None]:
        if not self._calls.acquire(blocking=False):
            raise ServiceBusy(f"{method}: {MAX_CALLS} calls are pending already; send fewer at once")
        with self._lock:
            self._pending += 1
        try:
            yield
        finally:
            self._calls.release()
            with self._lock:
                self._pending -= 1

    def _open(self, session: str) -> _Session:
        """Return the session, new if there is none. Sessions that have ended or expired make room."""
        now = self._clock()
        with self._lock:
            own = self._sessions.get(session)
            if own is not None:
                own.used = now
                return own
            if len(self._sessions) >= self._config.max_sessions:
                self._make_room(now)
            self._number += 1
            worker = min(self._workers, key=lambda each: each.num_sessions)
            worker.num_sessions += 1
            own = self._sessions[session] = _Session(str(self._number), worker, now)
            return own

    def _make_room(self, now: float) -> None:
        """Remove the session that ended first, or else the one that has been idle for longest. Raises ServiceBusy."""
        limit = now - self._config.session_idle_seconds
        removable = [
            (not own.ended, own.used, name)
            for name, own in self._sessions.items()
            if own.ended or (own.used < limit and not own.lock.locked())
        ]
        if not removable:
            raise ServiceBusy(
                f"{len(self._sessions)} sessions are open already; raise environment.max_sessions, or close some"
            )
        self._discard(self._sessions.pop(min(removable)[2]))

    def _forget(self, session: str, own: _Session) -> None:
        """Remove a session, unless another one has its name now."""
        with self._lock:
            if self._sessions.get(session) is own:
                del self._sessions[session]
            self._discard(own)

    def _discard(self, own: _Session) -> None:
        """Close the environment of a session that was removed, on another thread: its worker may be busy. Needs the lock."""
        if own.removed:
            return
        own.removed = True
        own.worker.num_sessions -= 1
        try:
            self._closing.submit(self._close_environment, own)
        except RuntimeError:  # The service ends.
            return

    def _close_environment(self, own: _Session) -> None:
        try:
            own.worker.call("close", {"session": own.key}, CLOSE_TIMEOUT)
        except Exception as error:
            log.warning("an environment does not close", error=str(error))

    def _ask(self, session: str, own: _Session, method: str, arguments: dict[str, Any]) -> Answer:
        """Return the answer of the session's environment. The failure of a call is an answer, too.

        After any other error, the state of the environment is unknown, and the session is removed.
        """
        arguments = {"session": own.key, "quotes": self._config.quote_texts, **arguments}
        try:
            return own.worker.call(method, arguments, self._config.timeout_seconds)
        except FunctionFailed as error:
            # A process that ended by itself is a failure of the environment, which reward functions call a scorer error.
            outcome = Outcome.TIMEOUT if error.outcome == Outcome.TIMEOUT else Outcome.ENVIRONMENT_ERROR
            return {"outcome": outcome, "detail": str(error)}
        except BaseException:
            self._forget(session, own)
            raise

    def _answered(
        self, session: str, own: _Session, answer: Answer, encode: Callable[[Any], Continuation]
    ) -> EnvironmentReply:
        """Convert an answer and remember it as the session's last."""
        reply = self._reply(own, answer, encode)
        if reply.outcome is not Outcome.OK:
            log.warning("environment failed", session=session, outcome=reply.outcome.value, detail=reply.detail)
        own.reply, own.used, own.ended = reply, self._clock(), reply.done
        return reply

    def _reply(self, own: _Session, answer: Answer, encode: Callable[[Any], Continuation]) -> EnvironmentReply:
        if "outcome" in answer:
            return EnvironmentReply.failed(Outcome(answer["outcome"]), f"{self._class}: {answer['detail']}")
        try:
            # Nothing follows the last turn, so an observation would not be read.
            following = Continuation(NOTHING) if answer["done"] else encode(answer["observation"])
        except UnusableObservation as error:
            return EnvironmentReply.failed(Outcome.ENVIRONMENT_ERROR, f"{self._class}: {error}")
        reward = float(np.float32(answer["reward"]))
        assert math.isfinite(reward), "the worker checks rewards"
        state = _state_of(answer["snapshot"], own.conversation.state if own.conversation else None)
        return EnvironmentReply(following.observation, reward, answer["done"], prompt=following.prompt, state=state)


@dataclass(slots=True)
class _Session:
    """One episode. ``lock`` is held during its calls."""

    key: str
    """Name of the episode in its worker. A session that starts again later has another one."""
    worker: _Worker
    used: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    request: tuple[Any, ...] = ()
    turn: int = 0
    conversation: Conversation | None = None
    reply: EnvironmentReply | None = None
    ended: bool = False
    removed: bool = False

    def check_open(self, session: str) -> None:
        """Raise SessionLost if the session was removed while this call waited for another one."""
        if self.removed:
            raise SessionLost(f"session {session}: was closed")


class _Worker:
    """A worker process with the environments of some sessions."""

    def __init__(self, class_name: str, settings: Mapping[str, Any]) -> None:
        """Start the process and import the class, whose keyword arguments are ``settings``. Raises ConfigError."""
        self._class, self._settings = class_name, dict(settings)
        self.num_sessions = 0
        self.busy_seconds: dict[str, float] = {"reset": 0.0, "step": 0.0, "restore": 0.0, "close": 0.0}
        self._lock = threading.Lock()
        self._worker = FunctionWorker(HOSTING, "environment.class_name")
        try:
            self.keeps_special_tokens = self._import_class()
        except BaseException:
            self._worker.close()
            raise
        self._has_class = True

    def call(self, method: str, arguments: dict[str, Any], timeout: float) -> Answer:
        """Return the answer of a function of ``host_child``. Raises as ``FunctionWorker.call``. ``timeout`` in seconds."""
        with self._lock:
            if not self._has_class:
                # The import in a new process is not part of the time of a call.
                self._import_class()
                self._has_class = True
            start = time.perf_counter()
            try:
                answer: Answer = self._worker.call([method, arguments], timeout)
                return answer
            except FunctionFailed as error:
                self._has_class = False
                error.args = (str(error).replace(f"environment.class_name {HOSTING}: ", ""),)
                raise
            finally:
                self.busy_seconds[method] += time.perf_counter() - start

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _import_class(self) -> bool:
        answer = self._worker.call(["describe", {"name": self._class, "settings": self._settings}], START_TIMEOUT)
        if "problem" in answer:
            raise ConfigError(f"environment.class_name {self._class}: {answer['problem']}")
        return bool(answer["keeps_special_tokens"])


def _state_of(snapshot: str, chat: Any) -> str:
    """Return the state of a reply: what the environment and the conversation need to continue. Empty if it is too large."""
    if not snapshot:
        return ""
    state = f'{{"environment": {snapshot}' + ("}" if chat is None else f', "chat": {json.dumps(chat)}}}')
    return state if len(state) <= MAX_STATE_CHARACTERS else ""


def _parts_of(state: str) -> tuple[Any, Any]:
    """Return what the environment and the conversation need, from the state of a reply. Raises InvalidRequest."""
    try:
        parts = json.loads(state)
        snapshot, chat = parts["environment"], parts.get("chat")
        if not isinstance(chat, list | None) or not all(isinstance(message["role"], str) for message in chat or ()):
            raise TypeError
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise InvalidRequest("state: expected that of a reply of this service") from None
    return snapshot, chat


def _start_workers(class_name: str, settings: Mapping[str, Any], count: int) -> list[_Worker]:
    """Start the workers in parallel. After an error none is left."""
    with ThreadPoolExecutor(max_workers=count) as pool:
        starts = [pool.submit(_Worker, class_name, settings) for _ in range(count)]
    failures = [error for start in starts if (error := start.exception()) is not None]
    if failures:
        for start in starts:
            if start.exception() is None:
                start.result().close()
        raise failures[0]
    return [start.result() for start in starts]
