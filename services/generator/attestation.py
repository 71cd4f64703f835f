"""Attestation: the weights of an engine, read back at the end of a Generate call."""

from __future__ import annotations

import time
from collections.abc import Mapping

from quartet.engines.engine import Engine, ReadableEngine

SHARE = 0.01
"""Share of the seconds of the Generate calls that reading back may take."""
MAX_SECONDS = 10.0
"""Largest amount of unused time that later calls may use."""


class Attestation:
    """Digests of the weights that were verified after loading, and how far they have been read back since.

    Reading back takes at most SHARE of the time of the calls. If that is too short for all tensors, each call continues after the
    last tensor of the call before, so that all of them have their turn. Not thread-safe.
    """

    def __init__(self) -> None:
        self.expected: Mapping[str, bytes] = {}
        self._names: list[str] = []
        self._next = 0
        self._seconds = 0.0

    def expect(self, digests: Mapping[str, bytes]) -> None:
        """Take note of the digest of each tensor, as verified after loading."""
        self.expected, self._names = digests, sorted(digests)

    def changed(self, engine: Engine, seconds: float) -> tuple[list[str], int]:
        """Return the names of tensors whose digest is another one now, and the number of tensors that were read back.

        ``seconds``: duration of the call that has ended. An engine that cannot be read back has none.
        """
        if not isinstance(engine, ReadableEngine) or engine.properties.digest != "read back":
            return [], 0
        self._seconds = min(self._seconds + SHARE * seconds, MAX_SECONDS)
        read: dict[str, bytes] = {}
        for _ in self._names:
            if self._seconds <= 0:
                break
            name = self._names[self._next % len(self._names)]
            self._next += 1
            if name not in read:
                start = time.perf_counter()
                read |= engine.held_digests([name])
                # May become negative, for a large tensor: later calls then make up for it.
                self._seconds -= time.perf_counter() - start
        return sorted(name for name, digest in read.items() if digest != self.expected.get(name)), len(read)
