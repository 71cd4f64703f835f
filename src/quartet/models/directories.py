"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a sibling of ``directory`` and renames it into place, on disk before it is visible.

    A reader sees the old directory, for an instant none, or the whole new one, never half of it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (directory.with_name(f".{directory.name}.{tag}") for tag in ("writing", "replaced"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir()
        write(fresh)
        for path in [*fresh.rglob("*"), fresh]:
            flush(path)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
        flush(directory.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def flush(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
