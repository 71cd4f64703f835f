"""The processes of a role behind a list of addresses: which of them respond, join and leave, and which get the calls.

A host name with several addresses stands for a replica at each.
"""

from __future__ import annotations

import random
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from quartet.contract.status import ProcessStatus, Role, ServiceStatus
from quartet.errors import (
    Cancelled,
    MismatchError,
    NoResponse,
    QuartetError,
    QuotaExceeded,
    ServiceBusy,
    ServiceUnavailable,
)
from quartet.rpc.call_interceptors import CallTracer
from quartet.rpc.clients import ServiceClient
from quartet.rpc.service_channel import Call, endpoints_at

log = structlog.get_logger()

Client = TypeVar("Client", bound=ServiceClient)
Result = TypeVar("Result")

CHECK_SECONDS = 0.5
"""Interval at which replicas that do not respond are asked again."""
RESOLVE_SECONDS = 10.0
"""Interval at which host names are resolved again, for replicas that have joined."""
SETTLE_SECONDS = 3.0
"""Time that all replicas get to respond once one is ready, so that the first step is split over all of them."""
QUOTA_JITTER = (1.0, 1.5)
"""Range of the factor by which a pause is longer than the time that a service with a quota names."""
IDENTITY = ("model", "dtype", "parameters", "tokenizer_fingerprint", "vocabulary_size")
"""Fields of the status in which all replicas of a frozen model agree."""
_LOST = (ServiceUnavailable, NoResponse, ServiceBusy)
"""Errors after which another replica may succeed with the same call."""


@dataclass(eq=False, slots=True)
class Replica(Generic[Client]):
    """One process of a role. ``status`` is None while it does not respond."""

    client: Client
    status: ServiceStatus | None = None
    instance_id: str = ""
    """Id of the process that gave the status, if it matters which one did."""
    refused: str = ""
    """Reason why it gets no calls."""
    last_error: str = ""
    left: bool = False
    """Set if its address no longer belongs to the role. It is forgotten once its calls have ended."""
    pending: int = 0
    """Calls that have not ended."""
    question: Future[tuple[ProcessStatus, ServiceStatus]] | None = None
    """The last request for its status."""

    @property
    def address(self) -> str:
        return self.client.channel.address

    @property
    def ready(self) -> bool:
        return self.status is not None and not self.refused and not self.left

    @property
    def awaited(self) -> bool:
        """Return whether its first status, or an error, is still to come."""
        return self.status is None and not self.last_error and not self.refused and not self.left


AnyReplica = TypeVar("AnyReplica", bound=Replica[Any])


class ReplicaSet(Generic[AnyReplica]):
    """The replicas of a role. ``lock`` guards all of them; its holder may change them.

    One thread resolves host names, and another asks the replicas that do not respond, all at once. Their answers arrive in
    callbacks.
    """

    def __init__(
        self, role: Role, addresses: Sequence[str], connect: Callable[[str], AnyReplica], note: Callable[[str], None]
    ) -> None:
        """``connect`` creates the replica at an address. ``note`` shows a line to the user."""
        self.role, self._addresses, self._connect, self._note = role, tuple(addresses), connect, note
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._by_address: dict[str, AnyReplica] = {}
        self._tracer: CallTracer | None = None
        self._closed = threading.Event()
        self._monitored = False

    @abstractmethod
    def _responded(self, replica: AnyReplica, process: ProcessStatus, status: ServiceStatus) -> None:
        """Take note of the status of a replica that was asked."""

    def trace(self, tracer: CallTracer | None) -> None:
        """Trace every call to the replicas."""
        with self.lock:
            self._tracer = tracer
            for replica in self._all():
                replica.client.channel.tracer = tracer

    def replicas(self) -> int:
        """Return the number of replicas that get calls, at least 1."""
        with self.lock:
            return max(1, len(self._ready()))

    def close(self) -> None:
        """End the monitor and the connections."""
        self._closed.set()
        with self.lock:
            replicas = self._all()
            self._by_address.clear()
        # Without the lock: closing a channel waits for the callbacks of its calls, which take the lock.
        for replica in replicas:
            replica.client.close()

    def _all(self) -> list[AnyReplica]:
        return [*self._by_address.values()]

    def _ready(self) -> list[AnyReplica]:
        return [replica for replica in self._by_address.values() if replica.ready]

    def _wait(self, timeout: float, check: Callable[[], None]) -> None:
        """Wait until a replica is ready, and until the others have responded or SETTLE_SECONDS are over.

        ``check`` may raise to end the wait. Raises ServiceUnavailable.
        """
        start = time.monotonic()
        with self._changed:
            while True:
                check()
                waited = time.monotonic() - start
                if self._ready() and (waited > SETTLE_SECONDS or not any(each.awaited for each in self._all())):
                    return
                refusals = [f"{each.address}: {each.refused}" for each in self._all() if each.refused]
                if waited > timeout or (refusals and len(refusals) == len(self._by_address)):
                    causes = "; ".join(refusals or [each.last_error for each in self._all() if each.last_error])
                    key = "generators" if self.role is Role.GENERATOR else f"{self.role}.address"
                    raise ServiceUnavailable(
                        f"{self.role} at {', '.join(self._addresses)}: none is ready within {timeout:g} s; start one, or correct "
                        f"services.{key}{causes and f' ({causes})'}"
                    )
                self._ask_absent()
                self._changed.wait(0.1)

    def _refuse(self, replica: AnyReplica, reason: str) -> None:
        """Give a replica no more calls."""
        with self._changed:
            if replica.refused != reason:
                log.warning("replica refused", role=str(self.role), address=replica.address, reason=reason)
                self._note(f"{self.role} at {replica.address} gets no work: {reason}")
                replica.refused = reason
                self._changed.notify_all()

    def _monitor(self) -> None:
        """Watch the replicas from now on."""
        with self.lock:
            if self._monitored:
                return
            self._monitored = True
        for work, seconds in ((self._resolve, RESOLVE_SECONDS), (self._ask_absent, CHECK_SECONDS)):
            name = f"{self.role} replicas"
            threading.Thread(target=self._repeat, args=(work, seconds), name=name, daemon=True).start()

    def _repeat(self, work: Callable[[], None], seconds: float) -> None:
        """Call ``work`` at an interval until the end, even if it fails."""
        while not self._closed.is_set():
            try:
                work()
            except Exception:
                log.exception("monitor of replicas failed; it continues", role=str(self.role), work=work.__name__)
            self._closed.wait(seconds)

    def _resolve(self) -> None:
        resolved = {address: endpoints_at(address) for address in self._addresses}
        endpoints = list(dict.fromkeys(endpoint for each in resolved.values() for endpoint in each))
        forgotten = []
        with self.lock:
            if self._closed.is_set():
                return
            if all(resolved.values()):
                for replica in self._all():
                    # A process that has ended, or a name that now has several addresses.
                    replica.left = replica.address not in endpoints
                    if replica.left and not replica.pending:
                        forgotten.append(self._by_address.pop(replica.address))
            # Without any that resolves, a call says what is wrong.
            for address in endpoints or (() if self._by_address else self._addresses):
                if address not in self._by_address:
                    replica = self._by_address[address] = self._connect(address)
                    replica.client.channel.tracer = self._tracer
        # Without the lock, as in ``close``.
        for replica in forgotten:
            replica.client.close()

    def _ask_absent(self) -> None:
        """Ask all replicas that get no calls for their status."""
        with self.lock:
            for replica in self._all():
                if not replica.ready and not replica.left:
                    self._ask(replica)

    def _ask(self, replica: AnyReplica) -> None:
        """Ask a replica for its status, unless an earlier question is not answered yet."""
        with self.lock:
            if self._closed.is_set() or (replica.question is not None and not replica.question.done()):
                return
            try:
                question = replica.question = replica.client.start_status()
            except QuartetError:
                return  # It has left meanwhile.
        question.add_done_callback(partial(self._answered, replica))

    def _answered(self, replica: AnyReplica, question: Future[tuple[ProcessStatus, ServiceStatus]]) -> None:
        try:
            process, status = question.result()
        except MismatchError as error:
            with self.lock:
                if not replica.refused:
                    replica.instance_id = ""
                self._refuse(replica, str(error))
        except QuartetError as error:
            with self.lock:
                replica.last_error = str(error)
        except Exception:
            log.exception("status of a replica cannot be read", role=str(self.role), address=replica.address)
        else:
            self._responded(replica, process, status)


class FrozenReplicas(ReplicaSet[Replica[Client]]):
    """Replicas of a frozen model. All must have the same model, so that which one computes a batch changes nothing.

    A replica that is lost gets no more calls until it responds again. Others repeat the calls that it had.
    """

    def __init__(
        self, role: Role, addresses: Sequence[str], connect: Callable[[str], Client], note: Callable[[str], None]
    ) -> None:
        """``connect`` creates the client for an address. ``note`` shows a line to the user."""
        super().__init__(role, addresses, lambda address: Replica(connect(address)), note)
        self._expected: ServiceStatus | None = None
        self._started = False
        self._resolve()

    def wait_until_ready(self, check_alive: Callable[[], None] = lambda: None, known: bool = False) -> ServiceStatus:
        """Wait until a replica is ready, and until the others have responded. Return a status.

        Raises MismatchError if replicas have different models. See ``ServiceClient.wait_until_ready`` for the rest.
        """
        self._resolve()
        replicas = self._all()
        if len(replicas) == 1:
            # This names what is wrong at the address.
            self._accept(replicas[0], replicas[0].client.wait_until_ready(check_alive, known))
        else:

            def check() -> None:
                refused = [f"{each.address}: {each.refused}" for each in replicas if each.refused]
                # Later, a replica with another model is left out instead.
                if refused and (not self._started or len(refused) == len(replicas)):
                    raise MismatchError("; ".join(refused))
                check_alive()

            self._wait(replicas[0].client.timeouts.load_seconds if replicas else 0.0, check)
            for each in replicas:
                if not each.ready:
                    self._note(f"{self.role} at {each.address} does not respond; the other replicas do its work")
        self._started = True
        self._monitor()
        assert self._expected is not None
        return self._expected

    def start(self, begin: Callable[[Client], Future[Result]]) -> Future[Result]:
        """Start a call on the replica with the fewest calls. If it is lost, another one repeats the call.

        The result raises the last error once no replica is left that has not failed. Replicas that other runs share may refuse a
        call because of this run's quota. It is repeated until one accepts it.
        """
        call = Call[Result]()
        self._next(call, begin, ())
        return call

    def _next(
        self,
        call: Call[Result],
        begin: Callable[[Client], Future[Result]],
        tried: tuple[Replica[Client], ...],
        error: BaseException | None = None,
    ) -> None:
        """Give a call to a replica that was not ``tried``. Without one, the call ends with ``error`` or waits for its quota."""
        replica = None if call.cancelling else self._take(tried)
        if replica is not None:
            try:
                attempt = begin(replica.client)
            except Exception as failure:
                attempt = Future()
                attempt.set_exception(failure)
            call.on_cancel(attempt.cancel)
            attempt.add_done_callback(partial(self._ended, call, begin, (*tried, replica), error))
        elif isinstance(error, QuotaExceeded) and not call.cancelling:
            woken, seconds = threading.Event(), error.retry_seconds * random.uniform(*QUOTA_JITTER)
            call.on_cancel(woken.set)

            def again() -> None:
                woken.wait(seconds)
                self._next(call, begin, (), error if woken.is_set() else None)

            threading.Thread(target=again, name=f"{self.role} quota", daemon=True).start()
        elif isinstance(error, QuotaExceeded):
            call.set_exception(Cancelled("the call was cancelled while it waited for its quota"))
        else:
            unavailable = Cancelled if call.cancelling else ServiceUnavailable
            call.set_exception(error or unavailable(f"{self.role}: no replica computes this"))

    def _ended(
        self,
        call: Call[Result],
        begin: Callable[[Client], Future[Result]],
        tried: tuple[Replica[Client], ...],
        before: BaseException | None,
        attempt: Future[Result],
    ) -> None:
        error = attempt.exception()
        self._release(tried[-1], error)
        if isinstance(error, _LOST):
            # A replica that refuses is there: the call waits for it, also if another one is lost.
            waits = isinstance(before, QuotaExceeded) and not isinstance(error, QuotaExceeded)
            self._next(call, begin, tried, before if waits else error)
        elif error is not None:
            call.set_exception(error)
        else:
            call.set_result(attempt.result())

    def _take(self, tried: Sequence[Replica[Client]]) -> Replica[Client] | None:
        """Return the replica with the fewest calls that was not ``tried``, and count a call; None without one."""
        with self.lock:
            candidates = [replica for replica in self._all() if replica not in tried]
            ready = [replica for replica in candidates if replica.ready]
            if not ready and not tried:
                # The call then says what is wrong.
                ready = [replica for replica in candidates if not replica.left]
            if not ready:
                return None
            replica = min(ready, key=lambda each: each.pending)
            replica.pending += 1
            return replica

    def _release(self, replica: Replica[Client], error: BaseException | None) -> None:
        """Take note of the end of a call. A replica that cannot be reached counts as lost."""
        with self.lock:
            replica.pending -= 1
            if isinstance(error, ServiceUnavailable) and replica.status is not None and not self._closed.is_set():
                log.warning("replica lost", role=str(self.role), address=replica.address, error=str(error))
                replica.status, replica.last_error = None, str(error)
                if len(self._by_address) > 1:
                    self._note(f"{self.role} at {replica.address} is lost; the other replicas do its work")

    def _responded(self, replica: Replica[Client], process: ProcessStatus, status: ServiceStatus) -> None:
        self._accept(replica, status)

    def _accept(self, replica: Replica[Client], status: ServiceStatus) -> None:
        """Take note of the status of a replica. The first one says what all must have, unless there is only one."""
        with self._changed:
            if self._expected is None or len(self._by_address) == 1:
                self._expected = status
            different = [
                f"{name} {getattr(status, name)!r}, expected {getattr(self._expected, name)!r}"
                for name in IDENTITY
                if getattr(status, name) != getattr(self._expected, name)
            ]
            if not different and (file := different_file(status, self._expected)):
                different = [f"another {file} than expected"]
            if different:
                replica.status = None
                reason = f"has {', '.join(different)}, as the other replicas have; start it with this run's config"
                self._refuse(replica, reason)
                return
            if self._started and len(self._by_address) > 1 and not replica.ready:
                self._note(f"{self.role} at {replica.address} is back")
            replica.status, replica.refused, replica.last_error = status, "", ""
            self._changed.notify_all()


def different_file(one: ServiceStatus, other: ServiceStatus) -> str:
    """Return the first file, by KEY/FILE, that differs between the models of two processes; "" if none does."""
    names = sorted(one.model_files.keys() | other.model_files.keys())
    return next((name for name in names if one.model_files.get(name) != other.model_files.get(name)), "")
