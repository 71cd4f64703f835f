"""The choice between everything and a delta, by the seconds that transfers over one link have taken."""

from __future__ import annotations

from dataclasses import dataclass

MIN_MEASURED_BYTES = 2**21
"""Size of the weights from which on transfers are measured. Smaller ones take no time worth a choice."""
REPEAT = 16
"""One of so many transfers is of the slower kind, because sizes of deltas and loads of machines change."""
MAX_SLOWDOWN = 2.0
"""A kind that takes this many times as long as the other is not tried again."""


@dataclass(slots=True)
class LinkSpeed:
    """Seconds of the last transfers from one source: everything, and as a delta with its encoding and decoding.

    The first transfer is everything, because a receiver that holds nothing can apply no delta. The second one is a delta.
    """

    everything: float | None = None
    delta: float | None = None
    transfers: int = 0

    def prefers_delta(self) -> bool:
        """Return whether the next transfer is faster as a delta, or shall be one to measure it."""
        if self.everything is None or self.delta is None:
            return True
        is_faster = self.delta <= self.everything
        fast, slow = sorted((self.delta, self.everything))
        tries_slow = self.transfers % REPEAT == 0 and slow < MAX_SLOWDOWN * fast
        return is_faster != tries_slow

    def record(self, as_delta: bool, seconds: float) -> None:
        """Record a transfer for which a delta was requested, or everything."""
        self.transfers += 1
        if as_delta:
            self.delta = seconds
        else:
            self.everything = seconds
