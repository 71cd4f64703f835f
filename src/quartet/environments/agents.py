"""Agents of one config in worker processes: a command, an HTTP service or an async function. Imports no torch."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from quartet.config.environment import EnvironmentConfig
from quartet.contract.agent import AgentResult, AgentRun, without_keys
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Outcome
from quartet.environments.agent_command import command_problem
from quartet.environments.agent_results import Result
from quartet.environments.agent_worker import AgentWorker
from quartet.environments.relay import Relay
from quartet.errors import ConfigError, ServiceBusy, SessionLost
from quartet.rewards.reward_source import parse_fields
from quartet.system.secret_files import AUTHORITY

log = structlog.get_logger()

PASSED_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE"),
    *(
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "NODE_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "NODE_EXTRA_CA_CERTS",
    ),
)
"""Variables of this process that agents get, beside those of ``environment.agent.pass_variables``."""
REPLY_SECONDS = 10.0
"""Time that a worker has to end an agent whose time is over, or whose caller is gone. One that has not is blocked."""
POLL = 0.5
"""Seconds between two checks of these times."""


class AgentHost:
    """Runs of the agent of one config. Thread-safe."""

    def __init__(self, config: EnvironmentConfig, certificates: Path | None = None) -> None:
        """Start the workers. ``certificates``: folder of this process, with the authority of the policy's endpoints.

        Raises ConfigError if the agent cannot be used. After an error no process is left.
        """
        agent = config.agent
        if not agent.kind:
            raise ConfigError("environment.agent: names no agent; give one of command, url and function")
        self._agent, self._name = agent, agent.name
        if agent.command is not None and (problem := command_problem(agent.command)):
            raise ConfigError(f"environment.agent.command {agent.command[0]}: {problem}")
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(agent.max_concurrent)
        self._running: set[RunningAgent] = set()
        self._seconds = 0.0
        self.ended: Counter[Outcome] = Counter()
        """Number of runs that have ended, by outcome."""
        self._settings: dict[str, Any] = {
            "command": agent.command,
            "url": agent.url,
            "function": agent.function,
            "api_key_file": _text(agent.api_key_file),
            "certificate_authority_file": _text(agent.certificate_authority_file),
            "max_concurrent": agent.max_concurrent,
            "timeout_seconds": agent.timeout_seconds,
            "quotes": config.quote_texts,
        }
        self._environment = self._variables()
        # An agent elsewhere calls the endpoint itself.
        self._relay = Relay(certificates / AUTHORITY) if certificates is not None and agent.url is None else None
        self._workers: list[AgentWorker] = []
        try:
            self._workers = [self._worker() for _ in range(config.num_workers)]
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self._restarts = [threading.Lock() for _ in self._workers]

    def start(self, run: AgentRun) -> RunningAgent:
        """Start the agent. Raises ServiceBusy without room, InvalidRequest for fields that are not JSON, and SessionLost."""
        parse_fields([run.fields] if run.fields else (), 1)
        if not self._free.acquire(blocking=False):
            raise ServiceBusy(
                f"{self._agent.max_concurrent} agents run already; raise environment.agent.max_concurrent, or send fewer at once"
            )
        try:
            if self._relay is not None:
                run = replace(run, base_url=self._relay.local_url(run.base_url))
            worker = self._free_worker()
            number, future = worker.start(run)
        except BaseException:
            self._free.release()
            raise
        running = RunningAgent(self, worker, number, future, self._agent.timeout_seconds, run.api_key)
        with self._lock:
            self._running.add(running)
        return running

    def status(self) -> ServiceStatus:
        """Return the status of the service: the agent and the load. No tokens reach it, so it has no vocabulary."""
        with self._lock:
            running, now = len(self._running), time.monotonic()
            seconds = self._seconds + sum(now - each.started for each in self._running)
        # The mean over the places for agents: the load is at most 1.
        return ServiceStatus(
            role=Role.ENVIRONMENT,
            model=self._name,
            device="cpu",
            busy_seconds={"agent": seconds / self._agent.max_concurrent},
            work_pending=running,
            open_sessions=running,
        )

    def close(self) -> None:
        """End the workers and all agents. Running calls fail."""
        for worker in self._workers:
            worker.close()
        if self._relay is not None:
            self._relay.close()

    def finish(self, running: RunningAgent, outcome: Outcome | None) -> None:
        """Note the end of a run. ``outcome``: None if it is lost."""
        with self._lock:
            self._running.discard(running)
            self._seconds += time.monotonic() - running.started
            if outcome is not None:
                self.ended[outcome] += 1
        self._free.release()

    def _worker(self) -> AgentWorker:
        return AgentWorker(self._settings, self._environment, self._name)

    def _free_worker(self) -> AgentWorker:
        """Return the worker with the fewest agents. One that has ended is replaced first."""
        index = min(range(len(self._workers)), key=lambda each: self._workers[each].running)
        with self._restarts[index]:
            if not self._workers[index].is_running:
                replacement = self._worker()
                replacement.wait_until_ready(is_restart=True)
                self._workers[index] = replacement
            return self._workers[index]

    def _variables(self) -> dict[str, str]:
        """Return the environment variables of the workers, and so of commands. A user may pass a secret by its name."""
        names = {*PASSED_VARIABLES, *self._agent.pass_variables}
        return {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONUNBUFFERED": "1"}


class RunningAgent:
    """One run of the agent."""

    def __init__(
        self, host: AgentHost, worker: AgentWorker, number: int, future: Future[Result], seconds: float, key: str
    ) -> None:
        """``seconds``: time limit of the run, which the worker applies."""
        self._host, self._worker, self._number, self._future, self._key = host, worker, number, future, key
        self.started = time.monotonic()
        self._seconds, self._limit = seconds, self.started + seconds + REPLY_SECONDS

    def cancel(self) -> None:
        """End the agent, without waiting. ``result`` returns then."""
        self._limit = min(self._limit, time.monotonic() + REPLY_SECONDS)
        self._worker.cancel(self._number)

    def result(self) -> AgentResult:
        """Wait for the end of the agent. Call once. Raises SessionLost if its process has ended."""
        outcome: Outcome | None = None
        try:
            result = self._wait()
            outcome = result.outcome
            return result
        finally:
            self._host.finish(self, outcome)

    def _wait(self) -> AgentResult:
        while True:
            with suppress(TimeoutError):
                return self._converted(self._future.result(POLL))
            if time.monotonic() > self._limit:
                return self._end_worker()

    def _end_worker(self) -> AgentResult:
        """End the worker, because an agent in it does not end: it blocks the event loop, and so all others."""
        is_cause = self._worker.end(
            "was replaced, because an agent in it did not end in time; does it wait without await?"
        )
        try:
            return self._converted(self._future.result(0))
        except SessionLost:
            if not is_cause:
                raise
        detail = (
            f"did not end within {self._seconds + REPLY_SECONDS:g} s, or {REPLY_SECONDS:g} s after its caller was gone"
        )
        return AgentResult.failed(Outcome.TIMEOUT, f"{self._host.status().model}: {detail}")

    def _converted(self, result: Result) -> AgentResult:
        outcome = Outcome(result.get("outcome", "ok"))
        logged = {
            name: without_keys(value, self._key) if isinstance(value, str) else value
            for name, value in result.get("logged", {}).items()
        }
        if outcome is Outcome.OK:
            return AgentResult(result.get("reward"), logged=logged)
        detail = without_keys(f"{self._host.status().model}: {result['detail']}", self._key)
        return AgentResult(outcome=outcome, detail=detail, logged=logged)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
