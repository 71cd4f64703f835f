"""Progress of one rank: marks along its commands, and the collective in which it waits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from socket import gethostname
from types import FrameType

COLLECTIVES = os.path.join("torch", "distributed", "")
"""Part of the file names whose functions exchange tensors between ranks."""
_DISPATCH = tuple(os.path.join("torch", name) for name in ("_ops.py", os.path.join("_library", ""), "_compile.py"))
"""Parts of the file names between such a function and its kernel."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Progress of one rank, as the others see it.

    ``reading``: it reads files or the buffer. ``error`` is the one that ended it, if it had the time to report it, and
    ``error_kind`` its class in ``quartet.errors``, or "" for any other class.
    """

    process: int
    host: str
    command: str = ""
    commands: int = 0
    marks: int = 0
    place: str = ""
    collective: str = ""
    reading: bool = False
    error: str = ""
    error_kind: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)


class Progress:
    """Marks of this rank. All ranks of a group make the same marks in the same order.

    Use it from the thread that computes. Other threads may call ``report``.
    """

    def __init__(self) -> None:
        self._command, self._place, self._error, self._error_kind = "", "", "", ""
        self._commands = self._marks = self._passes = 0
        self._reading = False
        self._thread = threading.get_ident()

    def begin(self, command: str) -> None:
        """Begin a command on this thread."""
        self._thread = threading.get_ident()
        self._place, self._marks, self._passes = "", 0, 0
        self._commands += 1
        self._command = command

    def end(self) -> None:
        """End the command. The rank then waits for the next one, for any time."""
        self._command = ""

    def begin_pass(self) -> None:
        """Mark the start of a forward pass, which is that of a micro-batch, and perhaps of its backward pass."""
        self._passes += 1
        self.mark()

    def mark(self, place: str = "") -> None:
        """Mark that this rank has arrived at ``place`` of the micro-batch, or of the command."""
        self._place = place
        self._marks += 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Mark that this rank reads files or the buffer in this context. Only the deadline of the call limits that time."""
        before, self._reading = self._reading, True
        try:
            yield
        finally:
            self._reading = before

    def fail(self, error: str, kind: str = "") -> None:
        """Record the error that ends this rank, and its class in ``quartet.errors``."""
        self._error, self._error_kind = error, kind

    def report(self) -> RankReport:
        """Return the progress so far. May be called from any thread."""
        passes = f"micro-batch {self._passes}" if self._passes else ""
        return RankReport(
            os.getpid(),
            gethostname(),
            self._command,
            self._commands,
            self._marks,
            ", ".join(filter(None, (passes, self._place))),
            _collective_of(sys._current_frames().get(self._thread)),
            self._reading,
            self._error,
            self._error_kind,
        )


def _collective_of(frame: FrameType | None) -> str:
    """Return the function of torch.distributed that a thread is in, or "" if it computes."""
    while frame is not None:
        file = frame.f_code.co_filename
        if COLLECTIVES in file:
            return frame.f_code.co_name
        if not any(part in file for part in _DISPATCH):
            return ""
        frame = frame.f_back
    return ""
