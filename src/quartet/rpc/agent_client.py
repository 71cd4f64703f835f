"""Client of an environment service that runs agents. A failure is an outcome, never a reward."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import structlog

from quartet.codec.environment import agent_result_from_proto
from quartet.codec.messages import to_message
from quartet.config.agent import AgentConfig
from quartet.config.deployment import RecoveryConfig, TimeoutsConfig
from quartet.config.section import MAX_PAUSE
from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.status import Role
from quartet.contract.trajectory import Outcome
from quartet.errors import (
    AccessRefused,
    Cancelled,
    MismatchError,
    NoResponse,
    QuartetError,
    ServiceBusy,
    ServiceUnavailable,
    SessionLost,
)
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel
from quartet.system.machine import own_address
from quartet.v1 import environment_pb2, environment_pb2_grpc

log = structlog.get_logger()

MAX_LOSSES = 3
"""Losses of a session by a service that still responds, after which the agent counts as the cause."""
BUSY_SECONDS = 0.2
"""Pause before another attempt of a call that the service has no room for."""
LOG_INTERVAL = 60.0
"""Seconds between log lines about a service that has no room."""

OnEnd = Callable[[AgentResult | QuartetError], None]
"""Receives the end of a run: its result, or an error that no other run of an agent would avoid, such as a wrong certificate."""


class AgentClient:
    """Runs agents at the environment service at one address. Thread-safe."""

    def __init__(
        self,
        address: str,
        agent_seconds: float,
        timeouts: TimeoutsConfig,
        recovery: RecoveryConfig,
        credentials: Credentials = LOCAL,
        needs_reward: bool = False,
    ) -> None:
        """``agent_seconds``: time limit of a run (``environment.agent.timeout_seconds``), which the service applies.

        A service that does not respond is waited for ``timeouts.load_seconds``. With ``needs_reward``, a
        result without a reward is a failure, because no reward source scores the trajectory.
        """
        self._channel = ServiceChannel(Role.ENVIRONMENT, address, credentials)
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel.grpc_channel)
        # The service ends the agent itself. The deadline is for one that does not answer.
        self._deadline_seconds, self._patience = agent_seconds + timeouts.score_seconds, timeouts.load_seconds
        self._recovery, self._needs_reward = recovery, needs_reward
        self._lock = threading.Lock()
        self._losses: Counter[str] = Counter()
        self._away_since: float | None = None
        self._logged_busy = -LOG_INTERVAL
        self._closed = threading.Event()

    @property
    def address(self) -> str:
        """HOST:PORT of the service."""
        return self._channel.address

    def endpoint_url(self, agent: AgentConfig, address: str, encrypted: bool) -> str:
        """Return the base URL that agents of the service get, for this process's endpoint that listens at ``address``.

        If it listens at all addresses of this machine, agents get the one from which the service is reached. Raises
        ServiceUnavailable if its name does not resolve.
        """

        def own_host() -> str:
            try:
                return own_address(self.address)
            except OSError as error:
                raise ServiceUnavailable(
                    f"environment at {self.address}: cannot be reached ({error.strerror or error}); set "
                    "environment.agent.advertise to the address at which agents reach this process"
                ) from None

        return agent.base_url(address, encrypted, own_host)

    def start(self, run: AgentRun, on_end: OnEnd) -> Callable[[], None]:
        """Start the agent and return at once. ``on_end`` is called once, on another thread.

        A result that is ``lost`` comes after a pause. The caller then starts the session again, with another key. The returned
        function ends the agent, without waiting for it: ``on_end`` is then not called, unless it is being called already.
        """
        started = _Started(self, run, on_end)
        started.send()
        return started.cancel

    def close(self) -> None:
        """Close the connection. The service ends all agents that still run, and they end with Cancelled."""
        self._closed.set()
        self._channel.close()

    def _begin(self, run: AgentRun) -> Future[AgentResult]:
        request = to_message(environment_pb2.RunAgentRequest, run)
        return self._channel.start(
            self._stub.RunAgent, request, self._deadline_seconds, "RunAgent", agent_result_from_proto
        )

    def _ended(self, session: str, ended: Future[AgentResult]) -> tuple[AgentResult | QuartetError | None, float]:
        """Return the end of a run, and the pause before it is told, in seconds. None: the call is to be sent again."""
        where = f"environment at {self.address}: RunAgent"
        try:
            result = ended.result()
        except QuartetError as error:
            if self._closed.is_set():
                return Cancelled(f"{where}: the client is closed"), 0.0
            return self._failure(session, error)
        self._note_answer()
        if self._needs_reward and result.outcome is Outcome.OK and result.reward is None:
            detail = f"{where}: the agent gave no reward, and reward.source none has none either; return one"
            result = AgentResult.failed(Outcome.ENVIRONMENT_ERROR, detail)
        return self._final(session, result), 0.0

    def _failure(self, session: str, error: QuartetError) -> tuple[AgentResult | QuartetError | None, float]:
        """Return what the error of a call means. See ``_ended``."""
        if isinstance(error, MismatchError | AccessRefused | Cancelled):
            return error, 0.0
        if isinstance(error, ServiceUnavailable):
            return self._unavailable(session, error)
        if isinstance(error, NoResponse):
            return self._final(session, AgentResult.failed(Outcome.TIMEOUT, str(error))), 0.0
        # The service answered.
        self._note_answer()
        if isinstance(error, ServiceBusy):
            self._log_busy(str(error))
            return None, BUSY_SECONDS
        detail = str(error)
        if isinstance(error, SessionLost):
            with self._lock:
                self._losses[session] += 1
                losses = self._losses[session]
            if losses < MAX_LOSSES:
                return AgentResult.failed(Outcome.ENVIRONMENT_ERROR, detail, lost=True), 0.0
            detail = f"{detail}; this happened {MAX_LOSSES} times"
        return self._final(session, AgentResult.failed(Outcome.ENVIRONMENT_ERROR, detail)), 0.0

    def _unavailable(self, session: str, error: QuartetError) -> tuple[AgentResult, float]:
        """Return the end of a run whose service is away, and the pause before it is told, in seconds.

        The pause is as long as the service has been away, so each further one is twice as long. The number of failures does not
        count, because all agents of a service fail together.
        """
        with self._lock:
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            away = now - self._away_since
        failed = AgentResult.failed(Outcome.ENVIRONMENT_ERROR, str(error), lost=away <= self._patience)
        if not failed.lost:
            return self._final(session, failed), 0.0
        return failed, min(MAX_PAUSE, max(self._recovery.backoff_seconds, away))

    def _final(self, session: str, result: AgentResult) -> AgentResult:
        self._forget(session)
        if result.outcome is not Outcome.OK:
            log.warning("agent failed", session=session, outcome=result.outcome.value, detail=result.detail)
        return result

    def _forget(self, session: str) -> None:
        with self._lock:
            self._losses.pop(session, None)

    def _note_answer(self) -> None:
        with self._lock:
            self._away_since = None

    def _log_busy(self, error: str) -> None:
        with self._lock:
            now = time.monotonic()
            due = now - self._logged_busy > LOG_INTERVAL
            if due:
                self._logged_busy = now
        if due:
            log.info("agents wait for room", error=error)


class _Started:
    """One run of an agent, which may be sent several times until the service has room."""

    def __init__(self, client: AgentClient, run: AgentRun, on_end: OnEnd) -> None:
        self._client, self._run, self._on_end = client, run, on_end
        self._lock = threading.Lock()
        self._cancelled = False
        self._abort: Callable[[], object] = lambda: None

    def send(self) -> None:
        """Send the call, unless the run was cancelled."""
        try:
            call = self._client._begin(self._run)
        except Cancelled as error:  # The channel is closed.
            self._end(error)
            return
        with self._lock:
            self._abort, cancelled = call.cancel, self._cancelled
        if cancelled:
            call.cancel()
        call.add_done_callback(self._on_answer)

    def cancel(self) -> None:
        """End the agent. See ``AgentClient.start``."""
        with self._lock:
            self._cancelled, abort = True, self._abort
        abort()
        self._client._forget(self._run.session)

    def _on_answer(self, ended: Future[AgentResult]) -> None:
        if self._cancelled:
            return
        result, pause = self._client._ended(self._run.session, ended)
        next_move = self.send if result is None else lambda: self._end(result)
        if not pause:
            next_move()
            return
        timer = threading.Timer(pause, next_move)
        timer.daemon = True
        with self._lock:
            self._abort, cancelled = timer.cancel, self._cancelled
        if not cancelled:
            timer.start()

    def _end(self, result: AgentResult | QuartetError) -> None:
        if not self._cancelled:
            self._on_end(result)
