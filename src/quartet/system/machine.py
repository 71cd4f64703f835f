"""Cores and memory of this machine that a run may use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from quartet.errors import ConfigError

CONCURRENT_RUNS_VARIABLE = "QUARTET_CONCURRENT_RUNS"
"""Environment variable with the number of runs that share this machine. `quartet sweep --jobs` sets it."""


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its control group's quota.

    Concurrent runs divide them.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        usable = usable if quota == "max" else min(usable, round(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(1, usable // concurrent_runs())


def concurrent_runs() -> int:
    """Return the number of runs that share this machine. Raises ConfigError if the variable is not a number."""
    text = os.environ.get(CONCURRENT_RUNS_VARIABLE, "1")
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 1024):
        raise ConfigError(f"{CONCURRENT_RUNS_VARIABLE} {text}: expected a number from 1 to 1024; unset it for one run")
    return int(text)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of free memory on this machine, limited by the control group (a container's limit).

    Page cache that can be dropped counts as free. If the system does not report free memory, return all memory. Concurrent runs
    divide it. ``root`` is the root of the file system, for tests.
    """
    return _free_memory_bytes(root) // concurrent_runs()


def _free_memory_bytes(root: Path) -> int:
    try:
        lines = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        page_cache = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, ValueError, KeyError):  # No control group, or no limit ("max").
        return free
    return max(0, min(free, limit - used + int(page_cache)))


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory of this process, None if the system does not report it. ``root`` as in ``free_memory_bytes``."""
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # Not Linux.
        return None


def own_address(towards: str) -> str:
    """Return the IP address of this machine on the way to HOST:PORT. Nothing is sent. Raises OSError."""
    host, _, port = towards.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
