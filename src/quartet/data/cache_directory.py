"""Directory of the user's cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

CACHE_VARIABLE = "QUARTET_CACHE"
"""Environment variable with the directory of the cache. Empty: no cache."""


def user_cache(part: str) -> Path | None:
    """Return the folder ``part`` of $QUARTET_CACHE, $XDG_CACHE_HOME/quartet or ~/.cache/quartet. None: there is no cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        return Path(chosen) / part if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "quartet" / part if Path(home).is_absolute() else None


def limit_size(directory: Path, suffix: str, max_bytes: int) -> None:
    """Delete the files that were not used for the longest time until the others have at most ``max_bytes``.

    Deletes partial files that a killed process left, too.
    """
    files = []
    for path in directory.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # Another process has deleted it.
            continue
        if path.suffix == ".partial" and time.time() - status.st_mtime > 3600:
            delete(path)
        elif path.suffix == suffix:
            files.append((status.st_mtime, status.st_size, path))
    size = sum(item[1] for item in files)
    for _, bytes_freed, path in sorted(files):
        if size <= max_bytes:
            return
        delete(path)
        size -= bytes_freed


def delete(path: Path) -> None:
    """Delete a file if the disk allows it."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
