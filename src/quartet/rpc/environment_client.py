"""Client of the environment service. A failure is an outcome, never a reward.

A lost connection is established again. A session that the service has lost is restored from the state of its last reply. Without
a state it is repeated: the same reset, the same turns. The environment must then answer as before. So a service may be killed at
any moment, and the episode continues with the same tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from quartet.codec.environment import (
    EnvironmentReset,
    EnvironmentRestore,
    EnvironmentStep,
    environment_reply_from_proto,
)
from quartet.codec.messages import to_message
from quartet.config.deployment import RecoveryConfig, TimeoutsConfig
from quartet.contract.arrays import IntArray
from quartet.contract.status import Role
from quartet.contract.trajectory import EnvironmentReply, Outcome
from quartet.contract.turn_record import EpisodeDiffers
from quartet.errors import (
    AccessRefused,
    Cancelled,
    FailedPrecondition,
    MismatchError,
    NoResponse,
    QuartetError,
    ServiceBusy,
    ServiceUnavailable,
    SessionLost,
)
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel
from quartet.v1 import environment_pb2, environment_pb2_grpc

log = structlog.get_logger()

MAX_ATTEMPTS = 3
"""Maximum attempts of a call that the service answers with an error, or of the repetition of a lost session."""
MAX_CALLS = 32
"""Maximum calls of one client at once. Further calls wait for their turn. The service accepts more, from several clients."""
BUSY_SECONDS = 0.05
"""Pause before another attempt of a call that the service has no room for."""


@dataclass(slots=True)
class _Episode:
    """The calls of a session so far, and their answers."""

    reset: EnvironmentReset
    first: EnvironmentReply | None = None
    steps: list[EnvironmentStep] = field(default_factory=list)
    replies: list[EnvironmentReply] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The state of the last reply."""
        last = self.replies[-1] if self.replies else self.first
        return last.state if last is not None else ""


class EnvironmentClient:
    """Client of the environment service at one address. Thread-safe; the calls of one session follow each other."""

    def __init__(
        self,
        address: str,
        step_seconds: float,
        timeouts: TimeoutsConfig,
        recovery: RecoveryConfig,
        credentials: Credentials = LOCAL,
        vocabulary_size: int | None = None,
    ) -> None:
        """``step_seconds``: time limit of the environment for a reset or a step (``environment.timeout_seconds``).

        A call may wait ``timeouts.score_seconds`` more for other sessions. A service that does not respond is waited for
        ``timeouts.load_seconds`` since its last answer. ``vocabulary_size``: that of the policy, for ids of observations.
        """
        self._channel = ServiceChannel(Role.ENVIRONMENT, address, credentials)
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel.grpc_channel)
        self._deadline_seconds, self._patience = step_seconds + timeouts.score_seconds, timeouts.load_seconds
        self._recovery, self._vocabulary_size = recovery, vocabulary_size
        self._lock = threading.Lock()
        self._episodes: dict[str, _Episode] = {}
        self._closed = threading.Event()
        self._last_answer = time.monotonic()
        self._calls = threading.BoundedSemaphore(MAX_CALLS)
        # False for a service that does not offer RestoreSession.
        self._restores = True

    @property
    def address(self) -> str:
        """HOST:PORT of the service."""
        return self._channel.address

    def reset(self, session: str, seed: int, fields: str, token_ids: IntArray) -> EnvironmentReply:
        """Start the episode of a session after the prompt ``token_ids``, int32 [tokens]. ``fields``: a JSON object, or empty.

        A failure is the outcome of the reply. Raises MismatchError and AccessRefused for a wrong process or certificate,
        Cancelled after ``close``.
        """
        reset = EnvironmentReset(session, seed, fields, token_ids)
        episode = _Episode(reset)
        with self._lock:
            self._episodes[session] = episode
        reply = self._with_retries("Reset", session, lambda: self._send_reset(reset))
        episode.first = reply
        return self._checked(session, reply)

    def step(self, session: str, turn: int, token_ids: IntArray) -> EnvironmentReply:
        """Give the policy's turn, int32 [tokens], to the environment. ``turn`` counts from 1. Raises as ``reset``.

        Repeating the last turn of a session returns the same reply.
        """
        step = EnvironmentStep(session, turn, token_ids)
        with self._lock:
            episode = self._episodes.get(session)
        if episode is None:
            raise FailedPrecondition(f"environment: session {session} is not open; reset it first")
        if turn == len(episode.steps) and np.array_equal(episode.steps[-1].token_ids, token_ids):
            return episode.replies[-1]
        if turn != len(episode.steps) + 1:
            raise FailedPrecondition(
                f"environment: session {session}: got turn {turn}, expected {len(episode.steps) + 1}"
            )
        reply = self._with_retries("Step", session, lambda: self._send_step(episode, step))
        episode.steps.append(step)
        episode.replies.append(reply)
        return self._checked(session, reply)

    def resume(
        self,
        session: str,
        seed: int,
        fields: str,
        token_ids: IntArray,
        turns: Sequence[IntArray],
        replies: Sequence[EnvironmentReply],
    ) -> EnvironmentReply:
        """Continue an episode in a new session, after ``turns``, int32 [tokens] each.

        ``replies``: the reply to the reset, and to each turn; all are ok and none is the end. Returns the last of them, or the
        failure of the environment. Raises EpisodeDiffers if the environment answers otherwise than before, and as ``reset``.
        """
        first, *rest = replies
        steps = [EnvironmentStep(session, number, ids) for number, ids in enumerate(turns, 1)]
        episode = _Episode(EnvironmentReset(session, seed, fields, token_ids), first, steps, rest)
        with self._lock:
            self._episodes[session] = episode

        def repeated() -> EnvironmentReply:
            self._repeat(episode)
            return replies[-1]

        try:
            return self._checked(session, self._with_retries("Reset", session, repeated))
        except _Failed as failure:
            return self._checked(session, failure.reply)

    def end(self, session: str) -> None:
        """Forget a session, and let the service forget it, without waiting. May be called at any time."""
        with self._lock:
            if self._episodes.pop(session, None) is None:
                return
        request = environment_pb2.CloseSessionRequest(session=session)
        with suppress(Cancelled):  # Closed. The session expires.
            self._channel.start(
                self._stub.CloseSession, request, self._deadline_seconds, "CloseSession", lambda response: None
            )

    def close(self) -> None:
        """Close the connection. Calls in progress end with Cancelled."""
        self._closed.set()
        self._channel.close()

    def _checked(self, session: str, reply: EnvironmentReply) -> EnvironmentReply:
        if reply.outcome is not Outcome.OK:
            log.warning("episode failed", session=session, outcome=reply.outcome.value, detail=reply.detail)
        return reply

    def _send_reset(self, reset: EnvironmentReset) -> EnvironmentReply:
        return self._send(self._stub.Reset, to_message(environment_pb2.ResetRequest, reset), "Reset")

    def _send_step(self, episode: _Episode, step: EnvironmentStep) -> EnvironmentReply:
        for _ in range(MAX_ATTEMPTS):
            try:
                return self._send(self._stub.Step, to_message(environment_pb2.StepRequest, step), "Step")
            except SessionLost as lost:
                log.info("session is repeated", session=step.session, turns=len(episode.steps), cause=str(lost))
                try:
                    self._repeat(episode)
                except SessionLost:
                    continue
                except _Failed as failure:
                    return failure.reply
                except EpisodeDiffers as error:
                    return EnvironmentReply.failed(Outcome.ENVIRONMENT_ERROR, str(error))
        return EnvironmentReply.failed(
            Outcome.ENVIRONMENT_ERROR, f"{self._where('Step')}: the service lost the session {MAX_ATTEMPTS} times"
        )

    def _repeat(self, episode: _Episode) -> None:
        """Restore a lost session from the state of its last reply, or repeat its calls.

        Raises EpisodeDiffers if the environment answers otherwise than before, _Failed if it fails.
        """
        assert episode.first is not None
        if episode.state and self._restores:
            try:
                self._restore(episode)
                return
            except MismatchError:
                self._restores = False
        calls: list[tuple[Callable[[], EnvironmentReply], EnvironmentReply]] = [
            (lambda: self._send_reset(episode.reset), episode.first)
        ]
        for step, reply in zip(episode.steps, episode.replies, strict=True):
            calls.append((lambda step=step: self._send_step_once(step), reply))  # type: ignore[misc]
        for number, (call, expected) in enumerate(calls):
            reply = call()
            if reply.outcome is not Outcome.OK:
                raise _Failed(
                    reply.outcome,
                    f"{self._where('Step')}: turn {number} failed when a lost session was repeated: {reply.detail}",
                )
            if not reply.same_answer(expected):
                raise EpisodeDiffers(
                    f"{self._where('Step')}: turn {number} gave another answer when a lost session was repeated; the "
                    "environment is not deterministic for equal seeds and turns"
                )

    def _restore(self, episode: _Episode) -> None:
        """Restore a session from the state of its last reply. Raises _Failed, and MismatchError if no service can."""
        reset = episode.reset
        turn, state = len(episode.steps), episode.state
        restore = EnvironmentRestore(reset.session, reset.seed, reset.fields, reset.token_ids, turn, state)
        request = to_message(environment_pb2.RestoreSessionRequest, restore)
        reply = self._send(self._stub.RestoreSession, request, "RestoreSession")
        if reply.outcome is not Outcome.OK:
            where = self._where("RestoreSession")
            raise _Failed(reply.outcome, f"{where}: the environment failed after turn {turn}: {reply.detail}")

    def _send_step_once(self, step: EnvironmentStep) -> EnvironmentReply:
        return self._send(self._stub.Step, to_message(environment_pb2.StepRequest, step), "Step")

    def _send(self, method: Any, request: Any, title: str) -> EnvironmentReply:
        """Make one call, again and again while the service is away or busy. Raises its error, NoResponse at the deadline."""
        failures = 0
        deadline = time.monotonic() + self._deadline_seconds
        while True:
            try:
                with self._calls:
                    response = self._channel.call(method, request, self._deadline_seconds, title)
                self._last_answer = time.monotonic()
                return environment_reply_from_proto(response.reply, self._vocabulary_size)
            except ServiceBusy:
                self._last_answer = time.monotonic()
                if time.monotonic() > deadline:
                    raise
                self._pause(BUSY_SECONDS)
            except NoResponse:
                self._check_open(title)
                raise
            except ServiceUnavailable:
                self._check_open(title)
                if time.monotonic() - self._last_answer > self._patience:
                    raise
                failures += 1
                self._pause(self._recovery.pause(failures))

    def _check_open(self, title: str) -> None:
        """Raise Cancelled after ``close``, which fails calls in progress."""
        if self._closed.is_set():
            raise Cancelled(f"{self._where(title)}: the channel is closed") from None

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise Cancelled(f"environment at {self.address}: the client is closed")

    def _with_retries(self, title: str, session: str, call: Callable[[], EnvironmentReply]) -> EnvironmentReply:
        """Return the reply of ``call``, or the outcome of its failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return call()
            except (MismatchError, AccessRefused, Cancelled):
                raise
            except NoResponse as error:
                return EnvironmentReply.failed(Outcome.TIMEOUT, str(error))
            except (ServiceUnavailable, ServiceBusy) as error:
                return EnvironmentReply.failed(Outcome.ENVIRONMENT_ERROR, str(error))
            except QuartetError as error:
                # The service answered with an error or with a malformed message. The call is safe to repeat.
                if attempt == MAX_ATTEMPTS:
                    return EnvironmentReply.failed(Outcome.ENVIRONMENT_ERROR, str(error))
                log.warning("environment call is repeated", session=session, method=title, error=str(error))
                self._pause(self._recovery.pause(attempt))
        raise AssertionError("the last attempt returns")

    def _where(self, title: str) -> str:
        return f"environment at {self.address}: {title}"


class _Failed(Exception):
    """The environment failed when its session was restored or repeated."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.reply = EnvironmentReply.failed(outcome, detail)
