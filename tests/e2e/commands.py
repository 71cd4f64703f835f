"""The `quartet` command as a user runs it: a separate process, observed from outside."""

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
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from quartet.child_processes import tied_to_parent

Value = TypeVar("Value")

QUARTET = Path(sys.executable).with_name("quartet")
START = 90.0
"""Seconds that a run may take until its first step is committed. They allow for a busy machine."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Ended:
    """Result of a command. ``left`` names the processes and temporary files that outlived it."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[str]


class Command:
    """A running command. Its descendant processes are recognized by the private TMPDIR that they inherit."""

    def __init__(
        self,
        *command: str | Path,
        cwd: Path,
        terminal: bool = False,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the command.

        With ``terminal``, it has its own terminal, whose text ``out`` returns. ``environment`` extends the tests' environment.
        """
        # A unix socket's path has room for about 100 bytes: pytest's own folders are too deep.
        self.scratch = Path(tempfile.mkdtemp(prefix="e2e-"))
        (self.scratch / "tmp").mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("QUARTET_", "OMP_"))}
        self._screen = bytearray()
        self._started = time.monotonic()
        with (self.scratch / "out").open("wb") as out, (self.scratch / "err").open("wb") as err:
            ours, theirs = pty.openpty() if terminal else (None, None)
            if theirs is not None:
                fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
            self.process = subprocess.Popen(
                tied_to_parent([str(part) for part in command]),  # Not to outlive tests that are killed themselves.
                cwd=cwd,
                env={
                    **inherited,
                    "TMPDIR": str(self.scratch / "tmp"),
                    "HF_HUB_OFFLINE": "1",
                    "TERM": "xterm-256color" if terminal else "dumb",
                    **environment,
                },
                stdin=subprocess.DEVNULL if theirs is None else theirs,
                stdout=out if theirs is None else theirs,
                stderr=err if theirs is None else theirs,
                start_new_session=True,
                preexec_fn=_as_from_a_shell if theirs is None else _take_terminal,
            )
        self._terminal = ours
        if ours is not None and theirs is not None:
            os.close(theirs)
            threading.Thread(target=self._read_screen, args=(ours,), daemon=True).start()

    def _read_screen(self, descriptor: int) -> None:
        while True:
            try:
                self._screen += os.read(descriptor, 65536)
            except OSError:  # The last process with this terminal has ended.
                return

    @property
    def out(self) -> str:
        """Return what it has printed so far; from a terminal, without the escape sequences."""
        if self._terminal is not None:
            return _ESCAPES.sub("", self._screen.decode(errors="replace"))
        return (self.scratch / "out").read_text()

    @property
    def err(self) -> str:
        """Return what it has printed on standard error so far."""
        return (self.scratch / "err").read_text()

    def type(self, text: str) -> None:
        """Types into the terminal."""
        assert self._terminal is not None
        os.write(self._terminal, text.encode())

    def processes(self) -> dict[int, list[str]]:
        """Its living descendants, by process id: their command lines."""
        results = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                line = (entry / "cmdline").read_bytes()
                # Valkey writes its title over its environment; its title names the socket, which is in TMPDIR.
                known = line + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(self.scratch).encode() in known:
                results[int(entry.name)] = line.decode(errors="replace").rstrip("\0").split("\0")
        return results

    def child(self, name: str) -> int:
        """The process id of the service of this role, of the gateway, or of redis."""
        for pid, line in self.processes().items():
            module = ["-P", "-m", *(["quartet.gateway"] if name == "gateway" else ["quartet.services", name])]
            if line[1 : len(module) + 1] == module or (name == "redis" and "redis.sock" in line[0]):
                return pid
        raise AssertionError(f"no {name} among {self.processes()}")

    def wait_for(self, condition: Callable[[], Value], seconds: float = START) -> Value:
        """Return what ``condition`` returns, once that is true. Fails when the command ends first, or at the deadline."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, f"ended early: {self.ended()}"
            assert time.monotonic() < deadline, f"still waiting after {seconds} s: {self.out}{self.err}"
            time.sleep(0.02)
        return value

    def ended(self, seconds: float = START) -> Ended:
        """Wait for its end."""
        self.process.wait(seconds)
        lasted = time.monotonic() - self._started
        left = [" ".join(line) for line in self.processes().values()]
        left += [str(path) for path in (self.scratch / "tmp").iterdir()]
        return Ended(self.process.returncode, self.out, self.err, lasted, left)

    def kill_everything(self) -> None:
        """SIGKILL for the command and all that it started, as where a machine loses its power."""
        for pid in (self.process.pid, *self.processes()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        assert wait_until(lambda: not self.processes(), 10), self.processes()

    def clean_up(self) -> None:
        """End whatever still runs and removes its temporary files."""
        for pid in (self.process.pid, *self.processes()) if self.process.poll() is None else self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


def _as_from_a_shell() -> None:
    """Restore the handler of Ctrl-C: a shell ignores it for background tests, and child processes inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _take_terminal() -> None:
    _as_from_a_shell()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``condition`` came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def committed_steps(run: Path) -> int:
    """Lines of the run's metrics."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def settings(*assignments: str) -> list[str]:
    """``--set`` for each of ``KEY=VALUE``."""
    return [part for assignment in assignments for part in ("--set", assignment)]
