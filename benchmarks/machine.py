"""The machine that a benchmark runs on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from quartet.topology import cores


def describe() -> str:
    """Processor, cores that this process may use, memory, and how busy the machine is with other work."""
    kind = _value(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{kind}, {cores()} cores, {memory:.0f} GiB of memory, load {os.getloadavg()[0]:.1f} before"


def _value(path: Path, name: str) -> str:
    """What stands behind the first ``name :`` of a file; empty where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
