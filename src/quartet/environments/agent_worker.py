"""A process that runs agents, and the runs in it. The process runs ``quartet.environments.agent_child``."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import IO, Any

import structlog

from quartet.contract.agent import AgentRun, without_keys
from quartet.environments.agent_command import kill_with_keys
from quartet.environments.agent_results import Result
from quartet.errors import ConfigError, FailedPrecondition, SessionLost
from quartet.system.child_processes import module_command
from quartet.system.user_function import START_TIMEOUT

log = structlog.get_logger()

MAX_ANSWER_BYTES = 1024 * 1024
"""Maximum size of a result. The other process limits what it has."""
MAX_LOGGED_BYTES = 1024 * 1024
"""Maximum bytes of the output of all agents per minute that are logged. The rest is dropped."""
_PERIOD = 60.0
CLOSE_SECONDS = 5.0
"""Time that the process has to end its agents, and itself."""


class AgentWorker:
    """One process that runs agents. Thread-safe. It does not start again after its end."""

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str], name: str) -> None:
        """Start the process. ``settings``: see ``quartet.environments.agent_child.agent_of``. ``name``: the agent, for messages.

        ``environment``: the variables of the process. Call ``wait_until_ready`` before ``start``, and ``close`` at the end.
        """
        self._name = name
        self._lock = threading.Lock()
        self._runs: dict[int, tuple[str, Future[Result]]] = {}
        """The key and the result of each run."""
        self._numbers = itertools.count(1)
        self._ended = ""
        self._ready: Future[None] = Future()
        answers, sent = os.pipe()
        output, printed = os.pipe()
        try:
            self._process = subprocess.Popen(
                module_command("quartet.environments.agent_child", str(sent)),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                env=dict(environment),
                pass_fds=(sent,),
                # Ctrl-C does not reach it.
                start_new_session=True,
            )
        except BaseException:
            os.close(answers)
            os.close(output)
            raise
        finally:
            os.close(sent)
            os.close(printed)
        assert self._process.stdin is not None
        self._messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._messages.put(settings)
        for work, argument in ((self._send, self._process.stdin), (self._receive, answers), (_pass_on, output)):
            threading.Thread(target=work, args=(argument,), name="agents", daemon=True).start()

    @property
    def running(self) -> int:
        """Number of agents that run in it."""
        return len(self._runs)

    @property
    def is_running(self) -> bool:
        """Return whether the process can run agents."""
        return not self._ended

    def wait_until_ready(self, is_restart: bool = False) -> None:
        """Wait until the agent can be run. Raises ConfigError, or FailedPrecondition for a restart: it was usable before."""
        try:
            self._ready.result(START_TIMEOUT)
        except (TimeoutError, SessionLost, ConfigError) as error:
            reason = f"is not imported after {START_TIMEOUT:g} s" if isinstance(error, TimeoutError) else str(error)
            self.close()
            raise (FailedPrecondition if is_restart else ConfigError)(f"{self._name}: {reason}") from None

    def start(self, run: AgentRun) -> tuple[int, Future[Result]]:
        """Start the agent. Return the number of the run, and its result. The future raises SessionLost if the process ends."""
        future: Future[Result] = Future()
        with self._lock:
            if self._ended:
                raise SessionLost(f"{self._name}: {self._ended}")
            number = next(self._numbers)
            self._runs[number] = run.api_key, future
        values = {name: getattr(run, name) for name in AgentRun.__slots__}
        self._messages.put({"number": number, "run": values})
        return number, future

    def cancel(self, number: int) -> None:
        """End a run. Its future then has a result with outcome cancelled, unless it has another one already."""
        self._messages.put({"number": number})

    def end(self, reason: str) -> bool:
        """Kill the process with all its agents, which are lost for this ``reason``. Return False if it has ended before."""
        is_first = self._lose(reason)
        self.close()
        return is_first

    def close(self) -> None:
        """End the process with all its agents. May be called again."""
        self._lose("was ended")
        self._messages.put(None)
        # The process ends its agents when its input ends. One that cannot is killed with its group.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        # macOS raises PermissionError if the group has only zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lose(self, reason: str) -> bool:
        """Fail all runs. Return whether this is the first reason."""
        with self._lock:
            is_first, self._ended = not self._ended, self._ended or reason
            lost, self._runs = self._runs, {}
        # A process that was killed could not end its agents.
        if lost and sys.platform == "linux":
            kill_with_keys([key for key, _ in lost.values()])
        for _, future in lost.values():
            future.set_exception(SessionLost(f"{self._name}: the process that ran the agent {reason}"))
        if not self._ready.done():
            with contextlib.suppress(Exception):
                self._ready.set_exception(SessionLost(reason))
        return is_first

    def _send(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(OSError):
            while (message := self._messages.get()) is not None:
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()

    def _receive(self, descriptor: int) -> None:
        reason = ""
        with open(descriptor, "rb") as pipe:
            try:
                while line := pipe.readline(MAX_ANSWER_BYTES):
                    self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                reason = "wrote to the pipe of results; print instead"
        if not reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
                reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if self._ended:
            return
        log.warning("a process of agents ended", reason=reason)
        self.end(reason or "closed its pipe of results")

    def _take(self, message: dict[str, Any]) -> None:
        number = message["number"]
        if number == 0:
            if "unusable" in message:
                self._ready.set_exception(ConfigError(message["unusable"]))
            else:
                self._ready.set_result(None)
            return
        with self._lock:
            _, future = self._runs.pop(number, ("", None))
        if future is not None:
            future.set_result(message["result"])


def _pass_on(output: int) -> None:
    """Copy the output of agents to standard error without keys, limited per minute. Reads everything, so no agent blocks."""
    begun, passed = time.monotonic(), 0
    with open(output, encoding="utf-8", errors="replace") as pipe:
        while line := pipe.readline(MAX_LOGGED_BYTES):
            if time.monotonic() - begun > _PERIOD:
                begun, passed = time.monotonic(), 0
            if passed > MAX_LOGGED_BYTES:
                continue
            passed += len(line)
            if passed > MAX_LOGGED_BYTES:
                line = f"[agents printed over {MAX_LOGGED_BYTES} bytes in a minute: the rest is dropped]\n"
            with contextlib.suppress(OSError):
                os.write(2, without_keys(line).encode())
