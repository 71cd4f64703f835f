"""Which processes are there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def runs(process: int) -> bool:
    """Return whether it runs; one that has ended and waits to be noticed does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    """Every process that this one has started, those included that have ended and were not waited for."""
    results = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == os.getpid():
                results.add(int(entry.name))
    return results


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until it holds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds
        time.sleep(0.01)
