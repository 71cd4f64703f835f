"""One service process of a run: start it, restart it at the same address, check that it responds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import ServiceChannel
from quartet.system.child_processes import module_command, tied_to_parent
from quartet.system.fork_server import ForkedProcess, ForkServer

LOG_TAIL_LINES = 20
"""Number of log lines of a dead process in an error message."""


class ServiceProcess:
    """One service process. It reports through a pipe when it is ready, or why it ended."""

    def __init__(
        self,
        name: str,
        module: Sequence[str],
        environment: dict[str, str],
        log: Path,
        credentials: Credentials = LOCAL,
        fork_server: ForkServer | None = None,
        python: Path | None = None,
        role: str | None = None,
    ) -> None:
        """Start ``python -m MODULE...`` without waiting until it is ready. ``module`` includes the arguments.

        ``credentials`` authenticate liveness probes. With ``fork_server``, a server of this module and environment forks the
        process. ``python``: interpreter of another environment. Defaults to that of this process. ``role``: role that its
        certificate names. Defaults to ``name``.
        """
        self._role = role or name
        self.name, self.log, self._credentials, self._python = name, log, credentials, python
        self._module, self._environment, self._fork_server = module, environment, fork_server
        self._pipe: Any = None
        self._channel: ServiceChannel | None = None
        self.address: str | None = None
        self.start()

    def start(self) -> None:
        """Start the process. A restarted process listens at the address that it had before."""
        if self._pipe is not None:
            self._pipe.close()
        self._unread = b""
        self.ready = False
        self.reported_error: dict[str, Any] | None = None
        """``error``, ``exit_code``, and whether a rank was ``killed``, if the process ended with an error that it reported."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._pipe = os.fdopen(reader, "rb", buffering=0)
        listen = [] if self.address is None else ["--listen", self.address]
        module = [*self._module, *listen, "--ready-fd"]
        with self.log.open("ab") as output:
            forked = self._fork_server and self._fork_server.start(module[1:], output.fileno(), writer)
            self.process: ForkedProcess | subprocess.Popen[bytes] = forked or subprocess.Popen(
                tied_to_parent(module_command(*module, str(writer), python=self._python)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(writer,),
                # A separate session: Ctrl-C in the terminal reaches only Quartet, which stops its children in order.
                start_new_session=True,
            )
        os.close(writer)

    @property
    def pipe(self) -> Any:
        """The pipe with the messages of the process. ``start`` replaces it."""
        return self._pipe

    def read_messages(self) -> None:
        """Read what the process has reported. Never waits."""
        while chunk := self._pipe.read(65536):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "address" in message:
                self.address, self.ready = message["address"], True
            else:
                self.reported_error = message

    def responds(self, timeout: float) -> bool:
        """Return whether the process sends any response within ``timeout`` seconds. Must be called from one thread only."""
        if self.address is None:
            return False
        if self._channel is None:
            self._channel = ServiceChannel(self._role, self.address, self._credentials)
        return self._channel.responds(timeout)

    def close_channel(self) -> None:
        """Close the channel of the liveness probes. The process keeps running."""
        if self._channel is not None:
            self._channel.close()

    def repair(self) -> str:
        """Return "": a service needs no repair before a restart."""
        return ""

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_or_kill(self, deadline: float) -> None:
        """Wait for the end of the process until ``deadline`` (monotonic), then kill it."""
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pipe.close()


def describe_exit(process: ForkedProcess | subprocess.Popen[bytes]) -> str:
    """Return how a process ended, such as "killed by SIGKILL"."""
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def log_tail(log: Path) -> str:
    """Return the last lines of a log, for the end of an error message."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    if not lines:
        return f"its log {log} is empty"
    return f"the last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
