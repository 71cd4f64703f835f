"""The interface of sandboxes, and the request that every sandbox gets on standard input."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from quartet.verifiers.sandbox.inside import start
from quartet.verifiers.sandbox.limits import Limits
from quartet.verifiers.sandbox.process import SandboxProcess

START_SCRIPT = inspect.getsource(start)
"""Text of the first script, an argument of the Python in the sandbox."""


class Sandbox(Protocol):
    """A way to run programs that are isolated from this machine and from each other. Threads may share it."""

    @property
    def name(self) -> str:
        """Return the name of the tool and of its interpreter, for messages."""

    @property
    def memory_bound(self) -> str:
        """Return the bound of the memory of all processes of a program together, in words."""

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
