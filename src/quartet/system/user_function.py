"""Calls of a user's Python function in a separate process.

The function may print, leak memory, hang or crash there. A call that takes too long is ended together with its process, and the
next call starts a new process. Calls and responses are numbered lines of JSON over pipes, so other output is not mistaken for a
response. The child runs ``quartet.system.user_function_child``. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quartet.contract.trajectory import FAILURES, Outcome
from quartet.errors import Cancelled, ConfigError, FailedPrecondition, FunctionFailed
from quartet.system.child_processes import module_command, tied_to_parent
from quartet.system.secret_files import SECRET_VARIABLES

START_TIMEOUT = 120.0
"""Maximum seconds to import the function's module."""
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""Maximum size of a response."""
MAX_OUTPUT_BYTES = 64 * 1024
"""Maximum bytes of a function's output per minute that are logged. The rest is dropped."""
_OUTPUT_PERIOD = 60.0
_POLL = 0.1
"""Seconds between checks whether the process still runs and the call was not cancelled."""


class FunctionWorker:
    """One function in a process. The process is replaced after a timeout or a crash. Calls run one at a time."""

    def __init__(
        self,
        function: str,
        key: str,
        start_timeout: float = START_TIMEOUT,
        quotes: bool = False,
        quotes_key: str | None = None,
    ) -> None:
        """Start the process and import ``function`` there, given as package.module:callable.

        The working directory is the last entry of the import path. ``key`` is the function's config key, for messages. With
        ``quotes``, messages include the text of its exceptions, which may quote prompts and responses. ``quotes_key`` is the
        setting for it, by default ``quote_texts`` beside ``key``. Raises ConfigError if the function cannot be imported.
        """
        self._function, self._name, self._start_timeout = function, f"{key} {function}", start_timeout
        self._quotes_key = quotes_key or f"{key.rpartition('.')[0]}.quote_texts"
        self._quotes = quotes
        self._turn = threading.Lock()
        self._closed = threading.Event()
        # Linux ends a child with the thread that started it, so a thread of the worker starts it. The calling thread may end.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="function-starter")
        self._process: _Process | None = None
        self.required: Sequence[str] = ()
        """Parameters of the function without a default that can be given by name."""
        try:
            self._running_process()
        except BaseException:
            self.close()
            raise

    def call(
        self, arguments: Sequence[Any], timeout: float, about: str = "", keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function with JSON values and return its result, a JSON value (which may contain NaN and infinity).

        ``keywords`` are passed by name. ``timeout`` in seconds; ``about`` identifies the call in messages. Raises FunctionFailed
        if the function raises, takes longer, ends its process, or returns a value that is not JSON; ConfigError if a new process
        cannot import the function; Cancelled if the worker is closed.
        """
        return self.exchange({"arguments": list(arguments), "keywords": dict(keywords or {})}, timeout, about)[0]

    def exchange(
        self, request: Mapping[str, Any], timeout: float, about: str = "", expected: str = "JSON"
    ) -> tuple[Any, Mapping[str, Any]]:
        """Call the function, and return its result and what it logged. See ``call``.

        ``request``: see ``quartet.system.user_function_child.answer``. ``expected`` says which results are valid.
        """
        where = f"{self._name}, {about}" if about else self._name
        with self._turn:
            process = self._running_process()
            try:
                answer = process.call(request, timeout, self._closed.is_set)
            except _Lost as lost:
                if self._closed.is_set():
                    raise Cancelled(f"{where}: closed during the call") from None
                advice = "; raise its timeout if it needs longer" if isinstance(lost, _TooSlow) else ""
                outcome = Outcome.TIMEOUT if isinstance(lost, _TooSlow) else Outcome.SCORER_ERROR
                raise function_failed(f"{where}: {lost}{advice}", outcome) from None
        if "raised" in answer:
            raise function_failed(self._describe_exception(answer, about), _outcome(answer.get("outcome")))
        if "not_json" in answer:
            raise FunctionFailed(f"{where}: returned {answer['not_json']}, expected {expected}")
        return answer["result"], answer.get("logged") or {}

    def _describe_exception(self, answer: dict[str, Any], about: str) -> str:
        """Describe an exception of the function: the cause first, and how to see its text if that is left out."""
        location, text = answer["location"], answer["text"]
        cause = f"{self._name} raised {answer['raised']}{f' at {location}' if location else ''}"
        where = f" for {about}" if about else ""
        if text is None:
            return (
                f"{cause}{where}; the text of the exception is left out because it may quote a prompt or response: set "
                f"{self._quotes_key}: true to see it"
            )
        return f"{cause}{where}: {text}" if text else f"{cause}{where}"

    def close(self) -> None:
        """End the process. A running call fails. May be called again."""
        self._closed.set()
        with self._turn:
            if self._process is not None:
                self._process.end()
            self._starter.shutdown(wait=False)

    def _running_process(self) -> _Process:
        if self._closed.is_set():
            raise Cancelled(f"{self._name}: closed")
        if self._process is not None and self._process.is_running():
            return self._process
        is_restart = self._process is not None
        if self._process is not None:
            self._process.end()
        self._process = process = self._starter.submit(_Process, self._function, self._quotes).result()
        try:
            started = process.start(self._start_timeout, self._closed.is_set)
            problem, self.required = started.get("unusable"), started.get("required", ())
        except _Lost as lost:
            problem = f"cannot be imported from {Path.cwd()}: {lost}"
            # It was imported before: the machine is at fault, not the config, and a later try may succeed.
            if is_restart:
                process.end()
                raise FailedPrecondition(f"{self._name}: {problem}") from lost
        if problem is not None:
            process.end()
            raise ConfigError(f"{self._name}: {problem}")
        return process


def function_failed(text: str, outcome: Outcome) -> FunctionFailed:
    """Return the error of a call with its outcome."""
    error = FunctionFailed(text)
    error.outcome = outcome
    return error


def _outcome(name: str | None) -> Outcome:
    """Return the outcome that an exception names. One that names none, or "ok", is a scorer error."""
    return Outcome(name) if name in FAILURES else Outcome.SCORER_ERROR


class _Lost(Exception):
    """The process cannot be used any more. The text says why."""


class _TooSlow(_Lost):
    """The process did not respond in time."""


class _Process:
    """One child process."""

    def __init__(self, function: str, quotes: bool) -> None:
        self._answers, answers = os.pipe()
        output, printed = os.pipe()
        command = module_command(
            "quartet.system.user_function_child", function, str(answers), *(["quotes"] if quotes else [])
        )
        try:
            self._child = subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                bufsize=0,
                env={**{k: v for k, v in os.environ.items() if k not in SECRET_VARIABLES}, "PYTHONUNBUFFERED": "1"},
                pass_fds=(answers,),
                # A separate process group: the function's child processes can be ended with it, and Ctrl-C does not reach it.
                start_new_session=True,
            )
        except BaseException:
            os.close(self._answers)
            os.close(output)
            raise
        finally:
            os.close(answers)
            os.close(printed)
        assert self._child.stdin is not None
        self._requests = self._child.stdin
        os.set_blocking(self._requests.fileno(), False)
        self._open = True
        self._calls = 0
        self._output = threading.Thread(target=_pass_on, args=(output,), name="function-output", daemon=True)
        self._output.start()

    def is_running(self) -> bool:
        """Return whether the process can be called."""
        return self._open and self._child.poll() is None

    def start(self, timeout: float, unwanted: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the child's first response, which reports the import. For errors see ``call``."""
        return self._answer(0, b"", timeout, unwanted)

    def call(self, request: Mapping[str, Any], timeout: float, unwanted: Callable[[], bool]) -> dict[str, Any]:
        """Send a call and return its response. Raises _Lost. Any error during the exchange ends the process."""
        self._calls += 1
        line = json.dumps({**request, "number": self._calls}).encode() + b"\n"
        return self._answer(self._calls, line, timeout, unwanted)

    def _answer(self, number: int, line: bytes, timeout: float, unwanted: Callable[[], bool]) -> dict[str, Any]:
        try:
            answer = json.loads(self._exchange(line, timeout, unwanted))
            # The function may have written to the pipe, in this call or before. That is not a score.
            if isinstance(answer, dict) and answer.get("number") == number:
                return answer
            raise ValueError
        except (ValueError, RecursionError):
            self.end()
            raise _Lost("wrote to its worker's pipe, and was ended; print instead") from None
        except BaseException:
            # Also after Ctrl-C: a late response would be mistaken for that of the next call.
            self.end()
            raise

    def _exchange(self, line: bytes, timeout: float, unwanted: Callable[[], bool]) -> bytearray:
        deadline = time.monotonic() + timeout
        unsent, received = memoryview(line), bytearray()
        # Sending and receiving alternate, so that neither side blocks on a full pipe.
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if unsent:
                selector.register(self._requests, selectors.EVENT_WRITE)
            while not received.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _TooSlow(f"took longer than {timeout:g} s, and was ended")
                if unwanted():
                    raise _Lost("was cancelled")
                ready = selector.select(min(remaining, _POLL))
                for key, _ in ready:
                    if key.fd == self._answers:
                        received += self._receive()
                    else:
                        unsent = unsent[self._send(unsent) :]
                        if not unsent:
                            selector.unregister(self._requests)
                if not ready and self._child.poll() is not None:
                    # Child processes of the function may keep the pipe open.
                    raise self._ended()
                if len(received) > MAX_RESPONSE_BYTES:
                    raise _Lost(f"sent more than {MAX_RESPONSE_BYTES} bytes, and was ended")
        return received

    def end(self) -> None:
        """Kill every process of the child's group and wait for the child. May be called again."""
        if not self._open:
            return
        self._open = False
        # macOS raises PermissionError if the group has only zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        with contextlib.suppress(OSError):
            self._requests.close()
        os.close(self._answers)
        # Read the remaining output. A process that the function moved to another group may keep the pipe open longer.
        self._output.join(timeout=1.0)

    def _send(self, unsent: memoryview) -> int:
        try:
            return os.write(self._requests.fileno(), unsent)
        except BrokenPipeError:
            raise self._ended() from None

    def _receive(self) -> bytes:
        chunk = os.read(self._answers, 65536)
        if not chunk:
            raise self._ended()
        return chunk

    def _ended(self) -> _Lost:
        try:
            code = self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return _Lost("closed its worker's pipe, and was ended")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return _Lost(f"its process {how}")


def _pass_on(output: int) -> None:
    """Copy the function's output to standard error, limited per minute. Reads all output, so the function never blocks."""
    begun, passed = time.monotonic(), 0
    with open(output, "rb", buffering=0) as pipe:
        while chunk := pipe.read(65536):
            if time.monotonic() - begun > _OUTPUT_PERIOD:
                begun, passed = time.monotonic(), 0
            room = MAX_OUTPUT_BYTES - passed
            passed += len(chunk)
            kept = chunk[: max(0, room)]
            if 0 <= room < len(chunk):
                kept += f"\n[over {MAX_OUTPUT_BYTES} bytes printed in a minute: the rest is dropped]\n".encode()
            with contextlib.suppress(OSError):
                os.write(2, kept)
