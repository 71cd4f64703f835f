"""Where the time of a step goes that is not generation, scoring or update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds spent on parts of a step, by name."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what is spent inside, also where that fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """What has come together since the last lap, as ``seconds_NAME``."""
        found = {f"seconds_{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return found
