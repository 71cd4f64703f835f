"""The lease of a run: one orchestrator leads at a time, under an epoch that only rises.

The lease keeps two from training at once; the epoch, which every service remembers, keeps a former leader that has not heard of
its end from changing anything.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import WatchError

from quartet.buffer.connection import Redis, translate_errors
from quartet.errors import FailedPrecondition, LeadershipConflict, QuartetError
from quartet.processes import has_ended, this_process

DURATION = 15.0
"""Seconds that a lease lasts without renewal: an orchestrator that died elsewhere is succeeded after so long."""

POLL = 0.1
"""Seconds between looks at a lease that another has."""


class Lease:
    """One orchestrator's hold on a run. Renewed by a thread of its own until ``release``."""

    def __init__(
        self,
        client: Redis,
        url: str,
        run: str,
        at_least: int = 1,
        duration: float = DURATION,
        owner: str | None = None,
    ) -> None:
        """Takes the lease, under an epoch of ``at_least`` or more.

        Waits for the end of a lease that nobody renews: its holder died. Raises LeadershipConflict when another renews it. One of
        ``owner``, any text without a space, makes way: what it sent when the network was down may arrive after its release.
        """
        self._client, self._url, self._run, self._milliseconds = client, url, run, int(duration * 1000)
        self._key, self._epoch_key = f"quartet:{run}:lease", f"quartet:{run}:epoch"
        self._owner = f"{this_process()} {owner or secrets.token_hex(16)} "
        self._holder = self._owner + secrets.token_hex(16)
        self._ended = threading.Event()
        with translate_errors(url):
            while True:
                self._take()
                self.epoch = int(client.incr(self._epoch_key))
                if self.epoch < at_least:
                    self.epoch = at_least
                    client.set(self._epoch_key, at_least)
                # Stopped in between for longer than a lease lasts, it may have been succeeded already.
                if self._renew():
                    break
        threading.Thread(target=self._keep, args=(duration / 3,), name="lease", daemon=True).start()

    def _take(self) -> None:
        left = 2 * self._milliseconds
        while not self._client.set(self._key, self._holder, nx=True, px=self._milliseconds):
            found = self._client.get(self._key)
            holder = found.decode(errors="replace") if isinstance(found, bytes) else ""
            if holder and (holder.startswith(self._owner) or has_ended(holder.partition(" ")[0])):
                self._drop(holder)
                continue
            now = int(self._client.pttl(self._key))
            if now > left:
                raise LeadershipConflict(
                    f"run {self._run}: another orchestrator leads it; stop that one first, or choose another run.name"
                )
            left = now
            time.sleep(POLL)

    def claim(self, run_id: str) -> bool:
        """Makes what the buffer holds under the run's name that of the run with this id. Gives whether it was so before."""
        with translate_errors(self._url):
            return self._client.set(f"quartet:{self._run}:owner", run_id, get=True) == run_id.encode()

    def check(self) -> None:
        """Renews the lease. Raises FailedPrecondition when it is lost: another may lead now."""
        with translate_errors(self._url):
            held = self._renew()
        if not held:
            raise FailedPrecondition(f"run {self._run}: the lease is lost, another orchestrator may have taken over")

    def release(self) -> None:
        """Lets another lead at once. A Redis that is gone is no error: the lease ends by itself."""
        self._ended.set()
        try:
            with translate_errors(self._url):
                self._drop(self._holder)
        except QuartetError:
            pass

    # Each compares the holder and acts in one transaction, so that nobody's lease but one's own is touched.

    def _renew(self) -> bool:
        """Also takes back a lease that ran out while this process was stopped, where the epoch says that nobody has led since."""

        def renew(pipe: Any) -> bool:
            holder = pipe.get(self._key)
            if holder != self._holder.encode() and (holder or pipe.get(self._epoch_key) != str(self.epoch).encode()):
                return False
            pipe.multi()
            pipe.set(self._key, self._holder, px=self._milliseconds)
            return True

        return self._atomically(renew, self._key, self._epoch_key)

    def _drop(self, holder: str) -> None:
        def drop(pipe: Any) -> bool:
            if pipe.get(self._key) != holder.encode():
                return False
            pipe.multi()
            pipe.delete(self._key)
            return True

        self._atomically(drop, self._key)

    def _atomically(self, look: Callable[[Any], bool], *keys: str) -> bool:
        """Does what ``look`` queues, where it gives True, unless one of the ``keys`` changed meanwhile: then it looks again."""
        with self._client.pipeline() as pipe:
            while True:
                pipe.watch(*keys)  # type: ignore[no-untyped-call]
                if not look(pipe):
                    return False
                try:
                    pipe.execute()
                except WatchError:
                    continue
                return True

    def _keep(self, interval: float) -> None:
        while not self._ended.wait(interval):
            try:
                with translate_errors(self._url):
                    if not self._renew():
                        return
            except QuartetError:
                continue
