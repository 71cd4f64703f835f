"""Liveness of a child process: whether it responds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_INTERVAL = 5.0
"""Maximum seconds between two probes."""
RETRY_INTERVAL = 0.2
"""Seconds from a failed probe to the next one."""


class LivenessProbe:
    """Repeated probe of a process by a separate thread, so that reading the result never waits."""

    def __init__(self, name: str, responds: Callable[[float], bool], hang_timeout: float) -> None:
        """``responds`` takes a timeout in seconds. The probe's intervals derive from ``hang_timeout``, in seconds."""
        self._responds = responds
        self._interval, self._timeout = min(MAX_INTERVAL, hang_timeout / 8), min(MAX_INTERVAL, hang_timeout / 4)
        self._stopped, self._wake = False, threading.Event()
        self.silent_seconds = 0.0
        """Seconds without a response."""
        threading.Thread(target=self._probe_until_stopped, name=f"watchdog {name}", daemon=True).start()

    def reset(self) -> None:
        """Reset the count and probe immediately. Call this after a restart of the process."""
        self.silent_seconds = 0.0
        self._wake.set()

    def stop(self) -> None:
        """Stop probing. Can be called more than once."""
        self._stopped = True
        self._wake.set()

    def _probe_until_stopped(self) -> None:
        last, responded = time.monotonic(), True
        while not self._stopped:
            self._wake.wait(self._interval if responded else min(self._interval, RETRY_INTERVAL))
            self._wake.clear()
            responded = self._responds(self._timeout)
            now = time.monotonic()
            # A probe counts for at most its timeout. If it took longer, this process itself was suspended (Ctrl-Z), and the
            # silence says nothing about the other one.
            self.silent_seconds = (
                0.0 if responded else self.silent_seconds + min(now - last, self._interval + self._timeout)
            )
            last = now
