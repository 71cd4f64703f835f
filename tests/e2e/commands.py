"""Run the ``quartet`` command as a separate process, as a user does, and observe it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from quartet.system.child_processes import tied_to_parent
from quartet.system.fork_server import ForkedProcess
from tests.e2e.forked_program import STACKS
from tests.e2e.forked_program import start as start_fork
from tests.waiting import LIMIT, wait_until

Value = TypeVar("Value")

QUARTET = Path(sys.executable).with_name("quartet")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class CommandResult:
    """Result of a command. ``leftovers`` lists processes and temporary files that outlived it."""

    code: int
    out: str
    err: str
    seconds: float
    leftovers: list[str]


class Command:
    """A running command. Its descendant processes are recognized by the private TMPDIR that they inherit."""

    def __init__(
        self,
        *command: str | Path,
        cwd: Path,
        terminal: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
        fresh: bool = False,
        err: int | None = None,
    ) -> None:
        """Start the command.

        With ``terminal``, the command has its own terminal, and ``out`` returns the text on it. ``environment`` extends the
        environment of the tests. ``quartet`` and ``python`` are forks that need no imports, unless they are to be ``fresh``.
        ``err``: descriptor of its standard error, which the property of this name then does not show.
        """
        # The path of a Unix socket has at most about 100 bytes; the paths of pytest's folders are too long.
        self.scratch = Path(tempfile.mkdtemp(prefix="e2e-"))
        (self.scratch / "tmp").mkdir()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == "QUARTET_CACHE" or not name.startswith(("QUARTET_", "OMP_"))
        }
        self._screen = bytearray()
        self._started = time.monotonic()
        with (self.scratch / "out").open("wb") as out, (self.scratch / "err").open("wb") as errors:
            parent_end, child_end = pty.openpty() if terminal else (None, None)
            if child_end is not None:
                fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
            out_end = out.fileno() if child_end is None else child_end
            errors_end = err or (errors.fileno() if child_end is None else child_end)
            arguments = [str(part) for part in command]
            variables = {
                **inherited,
                "TMPDIR": str(self.scratch / "tmp"),
                "HF_HUB_OFFLINE": "1",
                "TERM": "xterm-256color" if terminal else "dumb",
                **environment,
            }
            forked = arguments[0] in (str(QUARTET), sys.executable) and not fresh
            self.process: subprocess.Popen[bytes] | ForkedProcess = (
                start_fork(
                    arguments,
                    cwd,
                    variables,
                    self.scratch,
                    out_end,
                    errors_end,
                    terminal=terminal,
                )
                if forked
                else subprocess.Popen(
                    tied_to_parent(arguments),  # Ends if the tests are killed.
                    cwd=cwd,
                    env=variables,
                    stdin=subprocess.DEVNULL if child_end is None else child_end,
                    stdout=out_end,
                    stderr=errors_end,
                    start_new_session=True,
                    preexec_fn=_reset_interrupt_handler if child_end is None else _take_terminal,
                )
            )
        self._terminal = parent_end
        if parent_end is not None and child_end is not None:
            os.close(child_end)
            threading.Thread(target=self._read_screen, args=(parent_end,), daemon=True).start()

    def _read_screen(self, descriptor: int) -> None:
        while True:
            try:
                self._screen += os.read(descriptor, 65536)
            except OSError:  # The last process on this terminal has ended.
                return

    @property
    def out(self) -> str:
        """Return the standard output so far; from a terminal, without escape sequences."""
        if self._terminal is not None:
            return _ESCAPES.sub("", self._screen.decode(errors="replace"))
        return (self.scratch / "out").read_text()

    @property
    def err(self) -> str:
        """Return the standard error so far."""
        return (self.scratch / "err").read_text()

    def type(self, text: str) -> None:
        """Type into the terminal."""
        assert self._terminal is not None
        os.write(self._terminal, text.encode())

    def processes(self) -> dict[int, str]:
        """Return the command lines of the living descendants by process id."""
        results = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                line = (entry / "cmdline").read_bytes()
                # Valkey overwrites its environment with its title. The title names the socket, and that is in TMPDIR.
                text = line + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(self.scratch).encode() in text:
                # A forked service has replaced its command line with one string.
                results[int(entry.name)] = line.decode(errors="replace").rstrip("\0").replace("\0", " ")
        return results

    def child(self, name: str, rank: int = 0) -> int:
        """Return the process id of a rank of a model service (by its role), of the gateway or of Redis.

        ``rank``: of the generators, the number in the order of their start.
        """
        if name == "generator":
            generators = [pid for pid, line in self.processes().items() if "quartet.services generator " in line]
            return sorted(generators)[rank]
        module = "quartet.gateway" if name == "gateway" else f"quartet.services {name} "
        for pid, line in self.processes().items():
            if ("redis.sock" if name == "redis" else module) in line and (
                f"(rank {rank} " in line or ("(rank" not in line and not rank)
            ):
                return pid
        raise AssertionError(f"no {name} among {self.processes()}")

    def wait_for(self, condition: Callable[[], Value], seconds: float = LIMIT) -> Value:
        """Wait until ``condition`` returns a true value and return that. Fail if the command ends first or time runs out."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, f"ended early: {self.wait()}"
            assert time.monotonic() < deadline, f"still waiting after {seconds} s: {self.out}{self.err}"
            time.sleep(0.02)
        return value

    def wait(self, seconds: float = LIMIT) -> CommandResult:
        """Wait until the command exits and return its result. If time runs out, fail with its output and its stacks."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            processes = self.processes()
            for pid in (self.process.pid, *processes):
                with suppress(ProcessLookupError):
                    os.kill(pid, STACKS)
            time.sleep(1)  # They write while this waits.
            raise AssertionError(f"still running after {seconds} s: {processes}\n{self.out}{self.err}") from None
        duration = time.monotonic() - self._started
        leftovers = list(self.processes().values())
        leftovers += [str(path) for path in (self.scratch / "tmp").iterdir()]
        return CommandResult(self.process.returncode, self.out, self.err, duration, leftovers)

    def kill_everything(self) -> None:
        """Send SIGKILL to the command and its descendants, as if the machine lost power."""
        for pid in (self.process.pid, *self.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        wait_until(lambda: not self.processes(), self.processes)

    def clean_up(self) -> None:
        """Kill the remaining processes and remove the temporary files."""
        for pid in (self.process.pid, *self.processes()) if self.process.poll() is None else self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _reset_interrupt_handler() -> None:
    """Restore the handler of SIGINT. A shell ignores SIGINT for background jobs, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_terminal() -> None:
    _reset_interrupt_handler()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def ends(action: Callable[[], object], seconds: float) -> bool:
    """Run ``action`` in a thread. Return whether it ends within ``seconds``."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def committed_steps(run: Path) -> int:
    """Return the number of lines in the run's metrics."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def settings(*assignments: str) -> list[str]:
    """Return ``--set`` options for assignments ``KEY=VALUE``."""
    return [part for assignment in assignments for part in ("--set", assignment)]
