"""The CPU threads and the determinism of torch in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_up_torch(threads: int) -> None:
    """Set the number of CPU threads of this process, and make torch compute the same result for the same input."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    # Unlike use_deterministic_algorithms, this does not import torch.compile, which takes a second and is not used.
    torch.set_deterministic_debug_mode("warn")
    # Filling memory helps to find reads before writes, but costs 5 % of an update.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
