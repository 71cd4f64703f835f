"""The lease of a run: at most one orchestrator is the leader at a time, under an epoch that only increases.

The lease prevents two orchestrators from training at the same time. Every service remembers the epoch and refuses requests of a
former leader that has not noticed the end of its lease.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import WatchError

from quartet.buffer.connection import Redis, translate_errors
from quartet.errors import FailedPrecondition, LeadershipConflict, QuartetError
from quartet.system.child_processes import has_ended, this_process

DURATION = 15.0
"""Seconds until a lease expires without renewal. After a leader died on another machine, a new one waits this long."""

POLL_SECONDS = 0.1
"""Seconds between checks of another orchestrator's lease."""
RELEASE_SECONDS = 2.0
"""Time limit for the release of a lease."""


class Lease:
    """The lease of one orchestrator. A separate thread renews it until ``release``."""

    def __init__(
        self,
        client: Redis,
        url: str,
        run: str,
        min_epoch: int = 1,
        duration: float = DURATION,
        owner: str | None = None,
    ) -> None:
        """Acquire the lease, under an epoch of at least ``min_epoch``.

        If another lease is not renewed, its holder has died: wait until it expires. Raises LeadershipConflict if it is renewed.
        ``owner`` is any text without a space. A lease of the same owner is replaced immediately, because a command that it sent
        while the network was down may arrive after its release.
        """
        self._client, self._url, self._run, self._milliseconds = client, url, run, int(duration * 1000)
        self._key, self._epoch_key = f"quartet:{run}:lease", f"quartet:{run}:epoch"
        self._owner = f"{this_process()} {owner or secrets.token_hex(16)} "
        self._holder = self._owner + secrets.token_hex(16)
        self._ended = threading.Event()
        with translate_errors(url):
            while True:
                self._acquire()
                self.epoch = int(client.incr(self._epoch_key))
                if self.epoch < min_epoch:
                    self.epoch = min_epoch
                    client.set(self._epoch_key, min_epoch)
                # If this process was suspended in between for longer than a lease lasts, another may hold the lease by now.
                if self._renew():
                    break
        threading.Thread(target=self._renew_periodically, args=(duration / 3,), name="lease", daemon=True).start()

    def _acquire(self) -> None:
        left = 2 * self._milliseconds
        while not self._client.set(self._key, self._holder, nx=True, px=self._milliseconds):
            value = self._client.get(self._key)
            holder = value.decode(errors="replace") if isinstance(value, bytes) else ""
            if holder and (holder.startswith(self._owner) or has_ended(holder.partition(" ")[0])):
                self._delete(holder)
                continue
            now = int(self._client.pttl(self._key))
            if now > left:
                raise LeadershipConflict(
                    f"run {self._run}: another orchestrator is its leader; stop that one first, or choose another run.name"
                )
            left = now
            time.sleep(POLL_SECONDS)

    def claim(self, run_id: str) -> bool:
        """Mark the buffer's data under this run name as that of the run with this id. Return whether it already was."""
        with translate_errors(self._url):
            return self._client.set(f"quartet:{self._run}:owner", run_id, get=True) == run_id.encode()

    def check(self) -> None:
        """Renew the lease. Raises FailedPrecondition if it is lost: another orchestrator may be the leader."""
        with translate_errors(self._url):
            held = self._renew()
        if not held:
            raise FailedPrecondition(f"run {self._run}: the lease is lost; another orchestrator may be the leader")

    def release(self) -> None:
        """Release the lease. If Redis does not do it within RELEASE_SECONDS, the lease expires."""
        self._ended.set()
        releasing = threading.Thread(target=self._release, name="release of the lease", daemon=True)
        releasing.start()
        releasing.join(RELEASE_SECONDS)

    def _release(self) -> None:
        with contextlib.suppress(QuartetError), translate_errors(self._url):
            self._delete(self._holder)

    # Each of these compares the holder and acts in one transaction, so that it never changes another orchestrator's lease.

    def _renew(self) -> bool:
        """Renew the lease, even if it expired while this process was suspended, unless the epoch shows a later leader.

        A lease that was released is not renewed.
        """

        def renew(pipe: Any) -> bool:
            holder = pipe.get(self._key)
            # A release after this check changes the key, so that the transaction is repeated and ends here.
            if self._ended.is_set():
                return False
            if holder != self._holder.encode() and (holder or pipe.get(self._epoch_key) != str(self.epoch).encode()):
                return False
            pipe.multi()
            pipe.set(self._key, self._holder, px=self._milliseconds)
            return True

        return self._atomically(renew, self._key, self._epoch_key)

    def _delete(self, holder: str) -> None:
        def delete(pipe: Any) -> bool:
            if pipe.get(self._key) != holder.encode():
                return False
            pipe.multi()
            pipe.delete(self._key)
            return True

        self._atomically(delete, self._key)

    def _atomically(self, queue: Callable[[Any], bool], *keys: str) -> bool:
        """Execute the commands that ``queue`` adds if it returns True. Repeat if one of the ``keys`` changed meanwhile."""
        with self._client.pipeline() as pipe:
            while True:
                pipe.watch(*keys)  # type: ignore[no-untyped-call]
                if not queue(pipe):
                    return False
                try:
                    pipe.execute()
                except WatchError:
                    continue
                return True

    def _renew_periodically(self, interval: float) -> None:
        while not self._ended.wait(interval):
            try:
                with translate_errors(self._url):
                    if not self._renew():
                        return
            except QuartetError:
                continue
