"""Starting a run's processes on this machine, watching them, and leaving none behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from quartet.buffer.connection import connect
from quartet.buffer.embedded import EmbeddedRedis
from quartet.config import Config, ServiceConfig
from quartet.errors import BufferFailed, ConfigError, ServiceFailed, ServiceUnavailable
from quartet.processes import with_parent
from quartet.telemetry.run_files import RunFiles
from quartet.topology import roles_of
from quartet.types import Role

LAST_LINES = 20
"""Log lines of a dead process that are shown."""
FAILURE_PATIENCE = 1.0
"""Seconds that the other processes have to end after one has failed, before they are killed."""


class Child:
    """One service process. It says through a pipe when it is ready, or why it ended."""

    def __init__(self, role: Role, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.role = role
        self.log = log
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        command = [sys.executable, "-m", "services", role, *arguments, "--ready-fd", str(writer)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(writer,),
                # A session of its own: Ctrl-C in the terminal reaches Quartet, and Quartet stops its children in order.
                start_new_session=True,
            )
        os.close(writer)
        self.pipe = os.fdopen(reader, "rb", buffering=0)
        self._unread = b""
        self.address: str | None = None
        self.last_words: dict[str, Any] | None = None

    def listen_to(self) -> None:
        """Takes in what the child has said; never waits."""
        while chunk := self.pipe.read(65536):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "address" in message:
                self.address = message["address"]
            else:
                self.last_words = message

    def describe_end(self) -> str:
        """How the process ended, and the last lines of its log."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f"{self.role}: {how}; the last lines of {self.log}:\n" + "\n".join(f"  {line}" for line in lines)

    def terminate(self) -> None:
        """Asks the process to drain and end."""
        if self.process.poll() is None:
            self.process.terminate()

    def reap(self, deadline: float) -> None:
        """Waits until ``deadline`` (monotonic), then kills."""
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.pipe.close()


class Launcher:
    """The processes of one run: what the config does not point at is started here. A context manager."""

    def __init__(self, config: Config, config_path: Path) -> None:
        """``config_path`` is the resolved config that the children read."""
        self._config, self._config_path = config, config_path
        self._logs = RunFiles(config.run_directory).logs
        self._redis: EmbeddedRedis | None = None
        self._children: list[Child] = []
        self.addresses: dict[Role, str] = {}
        self.url = ""

    def start(self, orchestrator: bool = True) -> None:
        """Starts the buffer, the model services, and the orchestrator once they are ready.

        Raises what the first process that fails says: ConfigError where the user can mend it, ServiceFailed otherwise.
        """
        self._start_buffer()
        for role in roles_of(self._config):
            service: ServiceConfig = getattr(self._config.services, role)
            if service.address is not None:
                self.addresses[role] = service.address
            else:
                self._start_child(role, [])
        self._wait_until_ready()
        if orchestrator:
            known = [f"services.{role}.address={address}" for role, address in self.addresses.items()]
            self._start_child(Role.ORCHESTRATOR, [part for item in known for part in ("--set", item)])
            self._wait_until_ready()

    def _start_buffer(self) -> None:
        if self._config.buffer.url is None:
            self._redis = EmbeddedRedis(RunFiles(self._config.run_directory).redis, self._logs / "redis.log")
            self.url = self._redis.url
            return
        self.url = self._config.buffer.url
        try:
            connect(self.url).close()
        except (ServiceUnavailable, BufferFailed) as error:
            # Nothing has begun yet, so this is something to mend rather than a failure of the run.
            raise ConfigError(str(error)) from None

    def _start_child(self, role: Role, arguments: list[str]) -> None:
        # The url may hold a password: the environment is private to the user, the command line is not.
        environment = {**os.environ, "QUARTET_BUFFER_URL": self.url, "PYTHONUNBUFFERED": "1"}
        arguments = ["--config", str(self._config_path), *arguments]
        self._children.append(Child(role, arguments, environment, self._logs / f"{role}.log"))

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.timeouts.load
        with selectors.DefaultSelector() as selector:
            waiting = [child for child in self._children if child.address is None]
            for child in waiting:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while waiting:
                for key, _ in selector.select(timeout=0.2):
                    child = key.data
                    child.listen_to()
                    if child.address is not None:
                        self.addresses[child.role] = child.address
                        selector.unregister(child.pipe)
                        waiting.remove(child)
                self.check()
                if time.monotonic() > deadline:
                    names = ", ".join(child.role for child in waiting)
                    raise ConfigError(
                        f"{names}: not ready within timeouts.load {self._config.timeouts.load:g} s; raise it, or see {self._logs}"
                    )

    def check(self, orchestrator: bool = True) -> None:
        """Raises when a process has ended that should run: with what it said, or with the last lines of its log.

        ``orchestrator`` False leaves the orchestrator out: it fails when a service does, and the service is the cause.
        """
        if self._redis is not None and self._redis.process.poll() is not None:
            words = self._redis.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise ServiceFailed("redis: ended; the last lines of its log:\n" + "\n".join(f"  {line}" for line in words))
        ended = [child for child in self._children if child.process.poll() is not None]
        for child in sorted(ended, key=lambda child: child.role is Role.ORCHESTRATOR):
            if child.role is Role.ORCHESTRATOR and not orchestrator:
                continue
            child.listen_to()
            if child.last_words is not None:
                kind = ConfigError if child.last_words["exit_code"] == 2 else ServiceFailed
                raise kind(f"{child.role}: {child.last_words['error']}")
            if child.role is not Role.ORCHESTRATOR or child.process.returncode != 0:
                raise ServiceFailed(child.describe_end())

    def stop(self, patience: float) -> None:
        """Stops what was started: orchestrator, model services, Redis. Each has ``patience`` seconds to drain."""
        for group in (
            [child for child in self._children if child.role is Role.ORCHESTRATOR],
            [child for child in self._children if child.role is not Role.ORCHESTRATOR],
        ):
            for child in group:
                child.terminate()
            deadline = time.monotonic() + patience
            for child in group:
                child.reap(deadline)
        self._children.clear()
        if self._redis is not None:
            self._redis.stop()
            self._redis = None

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure there is nothing to finish. After Ctrl-C calls in hand may end; a second Ctrl-C means "now".
        patience = FAILURE_PATIENCE if isinstance(error, Exception) else self._config.timeouts.drain
        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.stop(patience)
        except KeyboardInterrupt:
            for number in previous:
                signal.signal(number, signal.SIG_IGN)
            self.stop(patience=0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)
            raise
