"""Replicas of a frozen model: which of them respond, and which gets the next batch.

A replica that is lost gets no more calls until it responds again. Others repeat the calls that it had. Every replica must have
the same model, so that which one computes a batch changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from quartet.contract.arrays import FloatArray
from quartet.contract.status import ProcessStatus, Role, ServiceStatus
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.contract.weights import ReferenceVersion
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
from quartet.rpc.clients import ReferenceClient, RewardClient, ServiceClient
from quartet.rpc.pending_calls import PendingResult
from quartet.rpc.refused_calls import RepeatedCall
from quartet.rpc.service_channel import endpoints_at
from quartet.services.orchestrator.rollout.generator_members import CHECK_SECONDS, RESOLVE_SECONDS, SETTLE_SECONDS

log = structlog.get_logger()

Client = TypeVar("Client", bound=ServiceClient)
Result = TypeVar("Result")

IDENTITY = ("model", "dtype", "parameters", "tokenizer_fingerprint", "vocabulary_size")
"""Fields of the status in which all replicas agree."""
_LOST = (ServiceUnavailable, NoResponse, ServiceBusy)
"""Errors after which another replica may succeed with the same call."""


def different_file(one: ServiceStatus, other: ServiceStatus) -> str:
    """Return the first file, by KEY/FILE, that differs between the models of two processes; "" if none does."""
    names = sorted(one.model_files.keys() | other.model_files.keys())
    return next((name for name in names if one.model_files.get(name) != other.model_files.get(name)), "")


@dataclass(eq=False, slots=True)
class _Replica(Generic[Client]):
    """One replica. ``status`` is None while it does not respond."""

    client: Client
    status: ServiceStatus | None = None
    refused: str = ""
    """Reason why it gets no calls, until it reports the right model."""
    last_error: str = ""
    left: bool = False
    """Set if its address no longer belongs to the service. It is forgotten once its calls have ended."""
    pending: int = 0
    """Calls that have not ended."""
    question: PendingResult[tuple[ProcessStatus, ServiceStatus]] | None = None
    """The last request for its status."""

    @property
    def address(self) -> str:
        return self.client.channel.address

    @property
    def ready(self) -> bool:
        return self.status is not None and not self.refused and not self.left


class Replicas(Generic[Client]):
    """The replicas behind a list of addresses. A host name with several addresses stands for a replica at each. Thread-safe."""

    def __init__(
        self, role: Role, addresses: Sequence[str], connect: Callable[[str], Client], note: Callable[[str], None]
    ) -> None:
        """``connect`` creates the client for an address. ``note`` shows a line to the user."""
        self.role, self._addresses, self._connect, self._note = role, tuple(addresses), connect, note
        self._changed = threading.Condition(threading.RLock())
        self._members: dict[str, _Replica[Client]] = {}
        self._expected: ServiceStatus | None = None
        self._tracer: CallTracer | None = None
        self._closed = threading.Event()
        self._monitored = False
        self._resolve()

    def trace(self, tracer: CallTracer) -> None:
        """Trace every call to the replicas."""
        with self._changed:
            self._tracer = tracer
            for replica in self._members.values():
                replica.client.channel.tracer = tracer

    def replicas(self) -> int:
        """Return the number of replicas that get calls, at least 1."""
        with self._changed:
            return max(1, sum(replica.ready for replica in self._members.values()))

    def wait_until_ready(self, check_alive: Callable[[], None] = lambda: None, known: bool = False) -> ServiceStatus:
        """Wait until a replica is ready, and until the others have responded or SETTLE_SECONDS are over. Return a status.

        Raises MismatchError if replicas have different models. See ``ServiceClient.wait_until_ready`` for the rest.
        """
        self._resolve()
        with self._changed:
            members = list(self._members.values())
        if len(members) == 1:
            # This names what is wrong at the address.
            self._respond(members[0], members[0].client.wait_until_ready(check_alive, known))
        else:
            self._wait(members, check_alive)
        self._monitor()
        assert self._expected is not None
        return self._expected

    def _wait(self, members: Sequence[_Replica[Client]], check_alive: Callable[[], None]) -> None:
        timeout = members[0].client.timeouts.load_seconds if members else 0.0
        start = time.monotonic()
        settled: float | None = None
        while True:
            for replica in members:
                self._ask(replica)
            with self._changed:
                self._changed.wait(0.1)
                ready = [replica for replica in members if replica.ready]
                absent = [replica for replica in members if not replica.ready]
            now = time.monotonic()
            settled = settled or (now if ready else None)
            refused = "; ".join(f"{replica.address}: {replica.refused}" for replica in absent if replica.refused)
            # Later, a replica with another model is left out instead.
            if refused and (not self._monitored or all(replica.refused for replica in members)):
                raise MismatchError(refused)
            if ready and (not absent or now > (settled or now) + SETTLE_SECONDS):
                for replica in absent:
                    self._note(f"{self.role} at {replica.address} does not respond; the other replicas do its work")
                return
            if now > start + timeout:
                causes = "; ".join(replica.last_error for replica in members if replica.last_error)
                raise ServiceUnavailable(
                    f"{self.role} at {', '.join(self._addresses)}: no replica responded within {timeout:g} s; start one, or "
                    f"correct services.{self.role}.address{causes and f' ({causes})'}"
                )
            check_alive()

    def start(self, begin: Callable[[Client], PendingResult[Result]]) -> PendingResult[Result]:
        """Start a call on the replica with the fewest calls. If it is lost, another one repeats the call.

        The result raises the last error once no replica is left that has not failed.
        """
        return _ReplicatedCall(self, begin)

    def take(self, tried: Sequence[_Replica[Client]]) -> _Replica[Client] | None:
        """Return the replica with the fewest calls that was not ``tried``, and count a call; None without one."""
        with self._changed:
            candidates = [replica for replica in self._members.values() if replica not in tried]
            ready = [replica for replica in candidates if replica.ready]
            if not ready and not tried:
                # The call then says what is wrong.
                ready = [replica for replica in candidates if not replica.left]
            if not ready:
                return None
            replica = min(ready, key=lambda each: each.pending)
            replica.pending += 1
            return replica

    def release(self, replica: _Replica[Client], error: QuartetError | None) -> None:
        """Take note of the end of a call, with the error after which the replica counts as lost."""
        with self._changed:
            replica.pending -= 1
            if isinstance(error, ServiceUnavailable) and replica.status is not None and not self._closed.is_set():
                log.warning("replica lost", role=str(self.role), address=replica.address, error=str(error))
                replica.status, replica.last_error = None, str(error)
                if len(self._members) > 1:
                    self._note(f"{self.role} at {replica.address} is lost; the other replicas do its work")

    def close(self) -> None:
        """End the monitor and the connections."""
        self._closed.set()
        with self._changed:
            members = list(self._members.values())
            self._members.clear()
        # Without the lock: closing a channel waits for the callbacks of its calls, which take the lock.
        for replica in members:
            replica.client.close()

    # Monitoring

    def _monitor(self) -> None:
        with self._changed:
            if self._monitored:
                return
            self._monitored = True
        for work, seconds in ((self._resolve, RESOLVE_SECONDS), (self._ask_absent, CHECK_SECONDS)):
            threading.Thread(
                target=self._repeat, args=(work, seconds), name=f"{self.role} replicas", daemon=True
            ).start()

    def _repeat(self, work: Callable[[], None], seconds: float) -> None:
        """Call ``work`` at an interval until the end, even if it fails."""
        while not self._closed.wait(seconds):
            try:
                work()
            except Exception:
                log.exception("monitor of replicas failed; it continues", role=str(self.role))

    def _resolve(self) -> None:
        resolved = [endpoints_at(address) for address in self._addresses]
        # A name that does not resolve keeps its place: the call says what is wrong.
        endpoints_now = [
            endpoint
            for address, endpoints in zip(self._addresses, resolved, strict=True)
            for endpoint in endpoints or [address]
        ]
        with self._changed:
            if self._closed.is_set():
                return
            if all(resolved) or not self._members:
                for address, replica in self._members.items():
                    replica.left = address not in endpoints_now
                for address in dict.fromkeys(endpoints_now):
                    if address not in self._members:
                        client = self._connect(address)
                        client.channel.tracer = self._tracer
                        self._members[address] = _Replica(client)
            forgotten = [replica for replica in self._members.values() if replica.left and not replica.pending]
            for replica in forgotten:
                del self._members[replica.address]
        # Without the lock, as in ``close``.
        for replica in forgotten:
            replica.client.close()

    def _ask_absent(self) -> None:
        """Ask all replicas that get no calls for their status."""
        with self._changed:
            absent = [each for each in self._members.values() if not each.ready and not each.left]
        for replica in absent:
            self._ask(replica)

    def _ask(self, replica: _Replica[Client]) -> None:
        """Ask a replica for its status, unless an earlier question is not answered yet."""
        with self._changed:
            if self._closed.is_set() or replica.ready or (replica.question is not None and not replica.question.done()):
                return
            try:
                question = replica.question = replica.client.start_status()
            except QuartetError:
                return
        question.when_done(lambda: self._answered(replica, question))

    def _answered(
        self, replica: _Replica[Client], question: PendingResult[tuple[ProcessStatus, ServiceStatus]]
    ) -> None:
        try:
            _, status = question.result()
        except MismatchError as error:
            self._refuse(replica, str(error))
        except QuartetError as error:
            with self._changed:
                replica.last_error = str(error)
        else:
            self._respond(replica, status)

    def _respond(self, replica: _Replica[Client], status: ServiceStatus) -> None:
        """Take note of the status of a replica. The first one says what all must have, unless there is only one."""
        with self._changed:
            if self._expected is None or len(self._members) == 1:
                self._expected = status
            different = [
                f"{name} {getattr(status, name)!r}, expected {getattr(self._expected, name)!r}"
                for name in IDENTITY
                if getattr(status, name) != getattr(self._expected, name)
            ]
            if not different and (file := different_file(status, self._expected)):
                different = [f"another {file} than expected"]
        if different:
            self._refuse(
                replica, f"has {', '.join(different)}, as the other replicas have; start it with this run's config"
            )
            return
        with self._changed:
            if self._monitored and len(self._members) > 1:
                self._note(f"{self.role} at {replica.address} is back")
            replica.status, replica.refused, replica.last_error = status, "", ""
            self._changed.notify_all()

    def _refuse(self, replica: _Replica[Client], reason: str) -> None:
        with self._changed:
            if replica.refused != reason:
                log.warning("replica refused", role=str(self.role), address=replica.address, reason=reason)
                self._note(f"{self.role} at {replica.address} gets no work: {reason}")
            replica.status, replica.refused = None, reason
            self._changed.notify_all()


class _ReplicatedCall(PendingResult[Result]):
    """A call that goes from one replica to the next until one responds."""

    def __init__(self, replicas: Replicas[Any], begin: Callable[[Any], PendingResult[Result]]) -> None:
        self._replicas, self._begin = replicas, begin
        self._tried: list[_Replica[Any]] = []
        self._ended: Future[Result] = Future()
        self._lock = threading.RLock()
        self._call: PendingResult[Result] | None = None
        self._cancelled = False
        self._refused: QuotaExceeded | None = None
        self._next(None)

    def done(self) -> bool:
        """See ``PendingResult.done``."""
        return self._ended.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """See ``PendingResult.when_done``."""
        self._ended.add_done_callback(lambda _: callback())

    def result(self) -> Result:
        """See ``PendingResult.result``."""
        return self._ended.result()

    def cancel(self) -> None:
        """See ``PendingResult.cancel``. No other replica gets the call."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()

    def _next(self, error: QuartetError | None) -> None:
        """Give the call to another replica. Without one, it ends with ``error``."""
        replica = None if self._cancelled else self._replicas.take(self._tried)
        if replica is None:
            unavailable = Cancelled if self._cancelled else ServiceUnavailable
            self._ended.set_exception(error or unavailable(f"{self._replicas.role}: no replica computes this"))
            return
        self._tried.append(replica)
        try:
            call = self._begin(replica.client)
        except QuartetError as failure:
            self._replicas.release(replica, failure)
            self._next(failure)
            return
        with self._lock:
            self._call = call
            if self._cancelled:
                call.cancel()
        call.when_done(partial(self._handle, call, replica))

    def _handle(self, call: PendingResult[Result], replica: _Replica[Any]) -> None:
        try:
            result = call.result()
        except _LOST as error:
            self._replicas.release(replica, error)
            if isinstance(error, QuotaExceeded):
                self._refused = error
            # A replica that refuses is there: the call waits for it, also if another one is lost.
            self._next(self._refused or error)
        except Exception as error:
            self._replicas.release(replica, None)
            self._ended.set_exception(error)
        else:
            self._replicas.release(replica, None)
            self._ended.set_result(result)


class RewardReplicas(Replicas[RewardClient]):
    """The replicas of the reward service."""

    def score(
        self, batch: TokenBatch, fields: Sequence[str] = (), weights: Mapping[str, float] | None = None
    ) -> PendingResult[Scores]:
        """Start to score on one of the replicas. See ``RewardClient.score``.

        Replicas that other runs share may refuse a call because of this run's quota. It is repeated until one accepts it.
        """
        return RepeatedCall(lambda: self.start(lambda client: client.score(batch, fields, weights)))


class ReferenceReplicas(Replicas[ReferenceClient]):
    """The replicas of the reference service."""

    def log_probs(
        self, batch: TokenBatch, temperature: float, version: ReferenceVersion | None = None
    ) -> PendingResult[FloatArray]:
        """Start to compute log-probs on one of the replicas. See ``ReferenceClient.log_probs``."""
        return self.start(lambda client: client.log_probs(batch, temperature, version))
