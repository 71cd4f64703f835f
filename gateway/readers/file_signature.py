"""Detect that a file has changed."""

from __future__ import annotations

from pathlib import Path

Signature = tuple[int, int, int]
"""Inode, modification time in nanoseconds, size in bytes."""


def signature(path: Path) -> Signature:
    """Return a value that changes when the file does. Raises OSError."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
