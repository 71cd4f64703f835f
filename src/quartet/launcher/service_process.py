"""One service process of a run: started, started again at the same address, asked whether it lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quartet.processes import module_command, tied_to_parent
from quartet.rpc.channels import ServiceChannel
from quartet.rpc.security.credentials import LOCAL, Credentials

LAST_LINES = 20
"""Log lines of a dead process that are shown."""


class ServiceProcess:
    """One service process. It says through a pipe when it is ready, why it ended, or how the run did."""

    def __init__(
        self,
        name: str,
        module: Sequence[str],
        environment: dict[str, str],
        log: Path,
        credentials: Credentials = LOCAL,
    ) -> None:
        """Starts ``python -m MODULE...`` and does not wait for it; ``module`` is followed by its arguments.

        ``credentials`` are what it is shown when it is asked.
        """
        self.name, self.log, self._credentials = name, log, credentials
        self._module, self._environment = module, environment
        self._pipe: Any = None
        self._peer: ServiceChannel | None = None
        self.address: str | None = None
        self.begin()

    def begin(self) -> None:
        """Starts the process, anew where it has ended: then at the address that it had."""
        if self._pipe is not None:
            self._pipe.close()
        self._unread = b""
        self.ready = False
        self.reported_error: dict[str, Any] | None = None
        """``error`` and ``exit_code`` of a process that ended by itself."""
        self.outcome: str | None = None
        """How the run ended, by the word of an orchestrator that brought it to an end."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._pipe = os.fdopen(reader, "rb", buffering=0)
        command = module_command(*self._module, "--ready-fd", str(writer))
        if self.address is not None:
            command += ["--listen", self.address]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(writer,),
                # A session of its own: Ctrl-C in the terminal reaches Quartet, and Quartet stops its children in order.
                start_new_session=True,
            )
        os.close(writer)

    @property
    def pipe(self) -> Any:
        """What the process speaks through; changes with ``begin``."""
        return self._pipe

    def read_messages(self) -> None:
        """Takes in what the process has said; never waits."""
        while chunk := self._pipe.read(65536):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "address" in message:
                self.address, self.ready = message["address"], True
            elif "outcome" in message:
                self.outcome = message["outcome"]
            else:
                self.reported_error = message

    def answers(self, timeout: float) -> bool:
        """Whether the process answers within ``timeout`` seconds, with whatever. Called from one thread only."""
        if self.address is None:
            return False
        if self._peer is None:
            self._peer = ServiceChannel(self.name, self.address, self._credentials)
        return self._peer.answers(timeout)

    def close(self) -> None:
        """Ends the questions; the process is left as it is."""
        if self._peer is not None:
            self._peer.close()

    def repair(self) -> str:
        """Nothing that a restart needs."""
        return ""

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
        self._pipe.close()


def describe_exit(process: subprocess.Popen[bytes]) -> str:
    """In a few words."""
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def log_tail(log: Path) -> str:
    """The end of a log, to be shown below what it explains."""
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    if not lines:
        return f"its log {log} is empty"
    return f"the last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
