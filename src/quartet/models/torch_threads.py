"""The CPU threads, the memory and the determinism of torch in this process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT_BLOCK_BYTES = 2**25
"""Largest block of memory that a process keeps after it is freed."""
KEPT_BYTES = 2**28
"""Freed memory that a process keeps for the next allocation."""
# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8


def set_up_torch(threads: int) -> None:
    """Set the number of CPU threads of this process, and make torch compute the same result for the same input.

    The process also keeps freed memory, see ``keep_freed_memory``.
    """
    keep_freed_memory()
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    # Unlike use_deterministic_algorithms, this does not import torch.compile, which takes a second and is not used.
    torch.set_deterministic_debug_mode("warn")
    # Filling memory helps to find reads before writes, but costs 5 % of an update.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> bool:
    """Keep up to ``KEPT_BYTES`` of freed memory in this process, in one arena for all threads. Return whether that is possible.

    By default, glibc returns each large tensor to the kernel, which clears its pages again at the next allocation. That costs 5
    to 10 % of an update. Only glibc has these settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: KEPT_BLOCK_BYTES, _TRIM_THRESHOLD: KEPT_BYTES}
    return mallopt is not None and all(mallopt(name, value) for name, value in settings.items())


def set_num_threads(count: int) -> None:
    """Set the number of CPU threads that the calling thread's computations use. OpenMP keeps it for each calling thread."""
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Compute with ``count`` threads inside the context. None leaves the number unchanged."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
