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
from quartet.config.deployment import RecoveryConfig, TimeoutsConfig
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

        A service that does not respond is waited for ``timeouts.load_seconds`` since its last answer. With ``needs_reward``, a
        result without a reward is a failure, because no reward source scores the trajectory.
        """
        self._channel = ServiceChannel(Role.ENVIRONMENT, address, credentials)
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(self._channel.grpc_channel)
        # The service ends the agent itself. The deadline is for one that does not answer.
        self._deadline_seconds, self._patience = agent_seconds + timeouts.score_seconds, timeouts.load_seconds
        self._recovery, self._needs_reward = recovery, needs_reward
        self._lock = threading.Lock()
        self._losses: Counter[str] = Counter()
        self._last_answer, self._failures, self._logged_busy = time.monotonic(), 0, 0.0

    @property
    def address(self) -> str:
        """HOST:PORT of the service."""
        return self._channel.address

    def start(self, run: AgentRun, on_end: OnEnd) -> Callable[[], None]:
        """Start the agent and return at once. ``on_end`` is called once, on another thread.

        A result that is ``lost`` comes after a pause. The caller then starts the session again, with another key. The returned
        function ends the agent, without waiting for it: ``on_end`` is then not called, unless it is being called already.
        """
        started = _Started(self, run, on_end)
        started.send()
        return started.cancel

    def close(self) -> None:
        """Close the connection. The service ends all agents that still run."""
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
        except ServiceBusy as error:
            self._note_answer()
            self._log_busy(str(error))
            return None, BUSY_SECONDS
        except (MismatchError, AccessRefused, Cancelled) as error:
            return error, 0.0
        except SessionLost as error:
            self._note_answer()
            with self._lock:
                self._losses[session] += 1
                losses = self._losses[session]
            if losses < MAX_LOSSES:
                return AgentResult.failed(Outcome.ENVIRONMENT_ERROR, str(error), lost=True), 0.0
            detail = f"{error}; this happened {MAX_LOSSES} times"
            return self._final(session, AgentResult.failed(Outcome.ENVIRONMENT_ERROR, detail)), 0.0
        except NoResponse as error:
            return self._final(session, AgentResult.failed(Outcome.TIMEOUT, str(error))), 0.0
        except ServiceUnavailable as error:
            with self._lock:
                self._failures += 1
                failures, away = self._failures, time.monotonic() - self._last_answer
            if away > self._patience:
                return self._final(session, AgentResult.failed(Outcome.ENVIRONMENT_ERROR, str(error))), 0.0
            lost = AgentResult.failed(Outcome.ENVIRONMENT_ERROR, str(error), lost=True)
            return lost, self._recovery.pause(failures)
        except QuartetError as error:
            # The service answered with an error or with a malformed message.
            self._note_answer()
            return self._final(session, AgentResult.failed(Outcome.ENVIRONMENT_ERROR, str(error))), 0.0
        self._note_answer()
        if self._needs_reward and result.outcome is Outcome.OK and result.reward is None:
            detail = f"{where}: the agent gave no reward, and reward.source none has none either; return one"
            result = AgentResult.failed(Outcome.ENVIRONMENT_ERROR, detail)
        return self._final(session, result), 0.0

    def _final(self, session: str, result: AgentResult) -> AgentResult:
        self._forget(session)
        if result.outcome is not Outcome.OK:
            log.warning("agent failed", session=session, outcome=result.outcome, detail=result.detail)
        return result

    def _forget(self, session: str) -> None:
        with self._lock:
            self._losses.pop(session, None)

    def _note_answer(self) -> None:
        with self._lock:
            self._last_answer, self._failures = time.monotonic(), 0

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
