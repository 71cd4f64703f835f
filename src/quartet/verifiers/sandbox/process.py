"""A process in a sandbox: its limits, its request on standard input, and its messages."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox.inside import start
from quartet.verifiers.sandbox.inside.start import STARTED

_CHUNK = 65536
MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Identity:
    """User and group of a process on the host."""

    user: int
    group: int


class SandboxProcess:
    """The process that holds a sandbox. Standard input, output and error are pipes. Use it as a context manager."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        kill: Callable[[subprocess.Popen[bytes]], None],
        max_output_bytes: int,
        identity: Identity | None = None,
        inherited: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        on_close: Callable[[], None] = lambda: None,
        check_status: Callable[[int], None] = lambda status: None,
    ) -> None:
        """Start ``command``. Raises SandboxFailed.

        ``kill`` ends the sandbox with everything in it. ``on_close`` runs once. ``check_status`` raises SandboxFailed if an exit
        status is that of a broken sandbox, not of the program.
        """
        self._check_status = check_status
        self._name, self._kill, self._max_bytes = name, kill, max_output_bytes
        self._on_close: Callable[[], None] | None = on_close
        who: dict[str, Any] = {}
        if identity is not None:
            who = {"user": identity.user, "group": identity.group, "extra_groups": []}
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env=dict(environment or {}),
                pass_fds=inherited,
                **who,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxFailed(f"{name}: cannot be started ({type(error).__name__}: {error})") from None
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._input, self._pipes = (
            process.stdin,
            {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()},
        )
        self._output, self._errors = self._pipes[process.stdout.fileno()], self._pipes[process.stderr.fileno()]
        self._selector = selectors.DefaultSelector()
        for descriptor in self._pipes:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(self._input.fileno(), False)
        self._unsent = memoryview(b"")
        self._closes_input = False
        self.exceeded_output = False
        """True once the program has written more than its limit."""

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, content: bytes, closes_input: bool = False) -> None:
        """Send the request and wait until the limits hold. Raises SandboxFailed if they do not."""
        self.send(content)
        self._closes_input = closes_input
        self._pump(time.monotonic() + START_SECONDS, lambda: len(self._output) >= len(STARTED))
        if not self._output.startswith(STARTED):
            # What it writes before its end explains the failure.
            self._pump(time.monotonic() + 1.0, lambda: False)
            self.close()
            raise SandboxFailed(f"{self._name}: did not start: {self._reason()}")
        del self._output[: len(STARTED)]

    def _reason(self) -> str:
        text = " ".join(self._errors.decode(errors="replace").split())
        status = self._process.returncode
        return text[:MAX_ERROR_CHARACTERS] or f"no error message, exit status {status}"

    def send(self, content: bytes) -> None:
        """Queue ``content`` for standard input. It is sent while this process waits for output."""
        self._unsent = memoryview(bytes(self._unsent) + content)
        self._watch_input()

    def read_line(self, deadline: float) -> bytes | None:
        """Return the next line of output with its line break, or None at the end, the deadline or the limit of output."""
        self._pump(deadline, lambda: b"\n" in self._output)
        end = self._output.find(b"\n") + 1
        if not end:
            return None
        line = bytes(self._output[:end])
        del self._output[:end]
        return line

    def is_running(self) -> bool:
        """Return whether the sandbox has not ended."""
        return self._process.poll() is None

    def wait(self, deadline: float) -> int | None:
        """Return the exit status of the program (above 128: 128 + the signal), or None if the deadline or a limit came first."""
        self._pump(deadline, lambda: False)
        if self.exceeded_output:
            return None
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            raise SandboxFailed(f"{self._name}: was killed by signal {-status} from outside")
        self._check_status(status)
        return status

    @property
    def output(self) -> bytes:
        """Standard output that was not read as lines."""
        return bytes(self._output)

    @property
    def errors(self) -> str:
        """Standard error."""
        return self._errors.decode(errors="replace")

    def close(self) -> None:
        """End the sandbox with everything in it, and wait for that. May be called again. Raises SandboxFailed if it survives."""
        if self._on_close is None:
            return
        try:
            if self._process.poll() is None:
                # An engine waits for its client, which cannot end while it writes to a pipe that is full.
                self._close_output()
                self._kill(self._process)
                self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise SandboxFailed(f"{self._name}: did not end within {END_SECONDS:g} s of its kill") from None
        finally:
            self._close_output()
            self._selector.close()
            with contextlib.suppress(OSError):
                self._input.close()
            self._on_close()
            self._on_close = None

    def _pump(self, deadline: float, is_enough: Callable[[], bool]) -> None:
        """Move bytes until ``is_enough``, the end of the output, its limit, or the deadline."""
        open_pipes = self._open_pipes()
        while open_pipes and not is_enough() and not self.exceeded_output:
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in events:
                if key.fd in self._pipes:
                    if not self._receive(key.fd):
                        self._selector.unregister(key.fd)
                else:
                    self._send_some()
            if time.monotonic() >= deadline:
                return
            open_pipes = self._open_pipes()

    def _close_output(self) -> None:
        """Read no more. What was read stays in ``output`` and ``errors``."""
        for descriptor in self._open_pipes():
            self._selector.unregister(descriptor)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _open_pipes(self) -> list[int]:
        return [descriptor for descriptor in self._pipes if descriptor in self._selector.get_map()]

    def _receive(self, descriptor: int) -> bool:
        """Read what is there. Return False at the end of the pipe."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        content = self._pipes[descriptor]
        content += chunk
        if len(content) > self._max_bytes:
            self.exceeded_output = True
        return bool(chunk)

    def _send_some(self) -> None:
        try:
            sent = os.write(self._input.fileno(), self._unsent[:_CHUNK])
            self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return
        except BrokenPipeError:  # The program ended, or reads no more.
            self._unsent = memoryview(b"")
        self._watch_input()

    def _watch_input(self) -> None:
        is_watched = not self._input.closed and self._input.fileno() in self._selector.get_map()
        if self._unsent and not is_watched and not self._input.closed:
            self._selector.register(self._input.fileno(), selectors.EVENT_WRITE)
        elif not self._unsent and is_watched:
            self._selector.unregister(self._input.fileno())
            if self._closes_input:
                self._input.close()


MEBIBYTE = 1024 * 1024
START_SECONDS = 60.0
"""Maximum seconds until the sandbox runs. Longer is a failure of the sandbox, not of the program."""
END_SECONDS = 30.0
"""Maximum seconds until a killed sandbox has ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run of a program. A run is one test, or one process that answers the calls of several tests."""

    seconds: float = 10.0
    """Wall time of a test. More than the CPU time, so that a busy machine does not fail a right program."""
    cpu_seconds: int = 4
    """CPU time of each process."""
    memory_mb: int = 512
    """Address space of each process, in MiB. In a container or cgroup: memory of all processes together."""
    processes: int = 4
    """Processes and threads at a time."""
    files_mb: int = 16
    """Size of /tmp, the only place that can be written to, and of each file there, in MiB."""
    output_bytes: int = MEBIBYTE
    """Size of standard output, of standard error, and of each result of a call."""

    def __post_init__(self) -> None:
        """Raises ValueError if a limit is not above 0."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{field.name}: found {value!r}, expected a number above 0")
            if field.name != "seconds" and not isinstance(value, int):
                raise ValueError(f"{field.name}: found {value!r}, expected a whole number")


START_SCRIPT = inspect.getsource(start)
"""Text of the first script, an argument of the Python in the sandbox."""


class Sandbox(Protocol):
    """A way to run programs that are isolated from this machine and from each other. Threads may share it."""

    @property
    def name(self) -> str:
        """Return the name of the tool and of its interpreter, for messages."""

    def launch(self, limits: Limits) -> SandboxProcess:
        """Start a sandbox that waits for its request. Raises SandboxFailed."""


def request(
    limits: Limits,
    source: str,
    *,
    script: ModuleType | None = None,
    more: str = "",
    command: Sequence[str] = (),
    file_name: str = "program.py",
) -> bytes:
    """Return the first bytes of standard input, see ``quartet.verifiers.sandbox.inside.start``. ``more`` is for the script."""
    script_text = "" if script is None else inspect.getsource(script)
    texts = [text.encode(errors="surrogatepass") for text in (file_name, source, script_text, more, "\0".join(command))]
    numbers = {name: value for name, value in dataclasses.asdict(limits).items() if isinstance(value, int)}
    numbers |= {name: len(text) for name, text in zip(start.TEXTS, texts, strict=True)}
    header = "".join(f"{name} {value}\n" for name, value in numbers.items()).encode()
    return b"%010d" % len(header) + header + b"".join(texts)
