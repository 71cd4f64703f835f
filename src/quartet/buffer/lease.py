"""The lease of a run: one orchestrator leads at a time, under an epoch that only rises.

The lease keeps two from training at once; the epoch, which every service remembers, keeps a former leader that has not heard of
its end from changing anything.
"""

from __future__ import annotations

import secrets
import threading
import time

from quartet.buffer.connection import Redis, translated
from quartet.errors import AnotherLeads, FailedPrecondition, QuartetError
from quartet.processes import has_ended, this_process

DURATION = 15.0
"""Seconds that a lease lasts without renewal: an orchestrator that died elsewhere is succeeded after so long."""

POLL = 0.1
"""Seconds between looks at a lease that another has."""

# Each compares the holder and acts in one command, so that nobody's lease but one's own is touched.
_RENEW = """
local holder = redis.call('get', KEYS[1])
if holder == ARGV[1] or (not holder and redis.call('get', KEYS[2]) == ARGV[3]) then
    redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
    return 1
end
return 0
"""
"""Also takes back a lease that ran out while this process was stopped, where the epoch says that nobody has led since."""
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


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

        Waits for the end of a lease that nobody renews: its holder died. Raises AnotherLeads when another renews it. One of
        ``owner``, any text without a space, makes way: what it sent when the network was down may arrive after its release.
        """
        self._client, self._url, self._run, self._milliseconds = client, url, run, int(duration * 1000)
        self._key, self._epoch_key = f"quartet:{run}:lease", f"quartet:{run}:epoch"
        self._owner = f"{this_process()} {owner or secrets.token_hex(16)} "
        self._holder = self._owner + secrets.token_hex(16)
        self._ended = threading.Event()
        with translated(url):
            self._take()
            self.epoch = int(client.incr(self._epoch_key))
            if self.epoch < at_least:
                self.epoch = at_least
                client.set(self._epoch_key, at_least)
        threading.Thread(target=self._keep, args=(duration / 3,), name="lease", daemon=True).start()

    def _take(self) -> None:
        left = 2 * self._milliseconds
        while not self._client.set(self._key, self._holder, nx=True, px=self._milliseconds):
            found = self._client.get(self._key)
            holder = found.decode(errors="replace") if isinstance(found, bytes) else ""
            if holder and (holder.startswith(self._owner) or has_ended(holder.partition(" ")[0])):
                self._client.eval(_RELEASE, 1, self._key, holder)
                continue
            now = int(self._client.pttl(self._key))
            if now > left:
                raise AnotherLeads(
                    f"run {self._run}: another orchestrator leads it; stop that one first, or choose another run.name"
                )
            left = now
            time.sleep(POLL)

    def claim(self, run_id: str) -> bool:
        """Makes what the buffer holds under the run's name that of the run with this id. Gives whether it was so before."""
        with translated(self._url):
            return self._client.set(f"quartet:{self._run}:owner", run_id, get=True) == run_id.encode()

    def check(self) -> None:
        """Renews the lease. Raises FailedPrecondition when it is lost: another may lead now."""
        with translated(self._url):
            held = self._renew()
        if not held:
            raise FailedPrecondition(f"run {self._run}: the lease is lost, another orchestrator may have taken over")

    def release(self) -> None:
        """Lets another lead at once. A Redis that is gone is no error: the lease ends by itself."""
        self._ended.set()
        try:
            with translated(self._url):
                self._client.eval(_RELEASE, 1, self._key, self._holder)
        except QuartetError:
            pass

    def _renew(self) -> bool:
        keys = (self._key, self._epoch_key)
        return bool(self._client.eval(_RENEW, 2, *keys, self._holder, self._milliseconds, self.epoch))

    def _keep(self, interval: float) -> None:
        while not self._ended.wait(interval):
            try:
                with translated(self._url):
                    if not self._renew():
                        return
            except QuartetError:
                continue
