"""The lease of a run: one orchestrator leads at a time, under an epoch that only rises.

The lease keeps two from training at once; the epoch, which every service remembers, keeps a former leader that has not heard of
its end from changing anything.
"""

from __future__ import annotations

import secrets
import threading
import time

from quartet.buffer.connection import Redis, translated
from quartet.errors import FailedPrecondition, QuartetError

DURATION = 15.0
"""Seconds that a lease lasts without renewal: an orchestrator that died is succeeded after so long."""

POLL = 0.1
"""Seconds between looks at a lease that another has."""

# Each compares the holder and acts in one command, so that nobody's lease but one's own is touched.
_RENEW = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) else return 0 end"
)
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class Lease:
    """One orchestrator's hold on a run. Renewed by a thread of its own until ``release``."""

    def __init__(self, client: Redis, url: str, run: str, at_least: int = 1, duration: float = DURATION) -> None:
        """Takes the lease, under an epoch of ``at_least`` or more.

        Waits for the end of a lease that nobody renews: its holder died. Raises FailedPrecondition when another renews it.
        """
        self._client, self._url, self._run, self._milliseconds = client, url, run, int(duration * 1000)
        self._key, self._holder = f"quartet:{run}:lease", secrets.token_hex(16)
        self._ended, self._lost = threading.Event(), threading.Event()
        with translated(url):
            self._take()
            epoch = int(client.incr(f"quartet:{run}:epoch"))
            if epoch < at_least:
                client.set(f"quartet:{run}:epoch", at_least)
        self.epoch = max(epoch, at_least)
        threading.Thread(target=self._keep, args=(duration / 3,), name="lease", daemon=True).start()

    def _take(self) -> None:
        left = 2 * self._milliseconds
        while not self._client.set(self._key, self._holder, nx=True, px=self._milliseconds):
            now = int(self._client.pttl(self._key))
            if now > left:
                raise FailedPrecondition(
                    f"run {self._run}: another orchestrator leads it; stop that one first, or choose another run.name"
                )
            left = now
            time.sleep(POLL)

    def check(self) -> None:
        """Raises FailedPrecondition when the lease is lost: another may lead now."""
        if self._lost.is_set():
            raise FailedPrecondition(f"run {self._run}: the lease is lost, another orchestrator may have taken over")

    def release(self) -> None:
        """Lets another lead at once. A Redis that is gone is no error: the lease ends by itself."""
        self._ended.set()
        try:
            with translated(self._url):
                self._client.eval(_RELEASE, 1, self._key, self._holder)
        except QuartetError:
            pass

    def _keep(self, interval: float) -> None:
        while not self._ended.wait(interval):
            try:
                with translated(self._url):
                    held = self._client.eval(_RENEW, 1, self._key, self._holder, self._milliseconds)
            except QuartetError:
                continue
            if not held and not self._ended.is_set():
                self._lost.set()
                return
