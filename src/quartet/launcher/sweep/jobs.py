"""Several processes in turn, a fixed number at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

POLL_SECONDS = 0.1
"""Seconds between two checks of the processes."""
Item = TypeVar("Item")


class Job(Protocol):
    """A started process, as ``subprocess.Popen``."""

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""

    def terminate(self) -> None:
        """Ask the process to end."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self) -> int:
        """Wait for the end of the process."""


def run_jobs(
    items: Sequence[Item],
    slots: int,
    start: Callable[[Item, int], Job],
    ended: Callable[[Item, int], None],
    waiting: Callable[[list[Item]], None] = lambda _: None,
) -> None:
    """Start a process for each item, ``slots`` at a time, and wait for all. If this is interrupted, stop those that run.

    ``start`` gets the item and the number of its slot from 0, ``ended`` the item and the exit status. ``waiting`` gets the active
    items at every check. Call it from one thread that lives as long: the kernel ties the processes to it.
    """
    queue = deque(items)
    active: dict[int, tuple[Item, Job]] = {}
    try:
        while queue or active:
            for slot in range(slots):
                if queue and slot not in active:
                    item = queue.popleft()
                    active[slot] = item, start(item, slot)
            finished = [(slot, item, code) for slot, (item, job) in active.items() if (code := job.poll()) is not None]
            for slot, item, code in finished:
                del active[slot]
                ended(item, code)
            if not finished:
                waiting([item for item, _ in active.values()])
                time.sleep(POLL_SECONDS)
    finally:
        _stop([job for _, job in active.values()])


def _stop(jobs: Iterable[Job]) -> None:
    """End the processes and wait for them. A second interrupt kills them."""
    jobs = list(jobs)
    try:
        for job in jobs:
            job.terminate()
        for job in jobs:
            job.wait()
    except BaseException:
        for job in jobs:
            job.kill()
        for job in jobs:
            job.wait()
        raise
