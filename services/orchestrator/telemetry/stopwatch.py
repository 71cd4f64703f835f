"""Where the time of a step goes that is not generation, scoring or update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Stopwatch:
    """Seconds spent on parts of a step, by name."""

    def __init__(self, around: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> None:
        """``around`` a part of the given name goes what else takes notice of it."""
        self._around = around
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what is spent inside, also where that fails."""
        start = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """What has come together since the last lap, as ``seconds_NAME``."""
        found = {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return found
