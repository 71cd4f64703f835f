"""The compiler of the backend, which is never called."""

from __future__ import annotations

from triton.backends.compiler import BaseBackend as _Base


class Compiler(_Base):  # type: ignore[misc]
    """Compiler without an implementation."""


Compiler.__abstractmethods__ = frozenset()
