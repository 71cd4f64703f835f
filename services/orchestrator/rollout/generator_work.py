"""The trajectories of one batch that a pool of generators generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.status import GeneratorInfo, GeneratorState
from quartet.contract.trajectory import Trajectory, TrajectoryId
from quartet.contract.weights import TransferWay, WeightTransfer
from quartet.contract.work_split import by_expected_length, split_by_rule, take_by_load
from quartet.errors import QuartetError
from quartet.rpc.clients import GenerationClient
from quartet.rpc.replica_set import Replica

EVALUATION = 0
"""The step of an evaluation, which is always by one policy version."""


@dataclass(eq=False, slots=True)
class RemoteGenerator(Replica[GenerationClient]):
    """A generator in another process. ``digest`` names the weights that it is known to hold."""

    digest: bytes = b""
    transfer: WeightTransfer | None = None
    """Its last transfer of weights."""
    failures: int = 0
    """Failed calls since its last generation."""
    changes: int = 0
    """Calls of this process at whose end its weights had changed."""
    exhausted: bool = False
    """True if it is refused because of its failures, which may have another cause."""
    call: Future[Any] | None = None
    update: Future[WeightTransfer] | None = None
    """An update in flight, or one without work. No other call begins until it has ended."""
    work: Work | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    attempt: int = 0
    """Number of its Generate call, 0 without one."""

    def info(self) -> GeneratorInfo:
        """Return its state, and the number of trajectories that it generates."""
        state = GeneratorState.READY if self.ready else GeneratorState.REFUSED if self.refused else GeneratorState.LOST
        seen = self.work.seen if self.work is not None else set()
        return GeneratorInfo(self.address, state, self.refused, sum(each.id not in seen for each in self.requests))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A Generate call: the address of its generator, and its trajectories."""

    address: str
    requests: list[GenerationRequest]


class Work:
    """The trajectories of one batch: those that wait for a generator, and those that have arrived."""

    def __init__(
        self,
        batch: GenerationBatch,
        by_rule: bool,
        lock: threading.RLock,
        published: Mapping[int, bytes],
        last_attempt: Callable[[], int],
        cancel: Callable[[Work], None],
        refuse: Callable[[Work, Trajectory, str], None],
        beside_training: bool = False,
    ) -> None:
        """``lock`` guards all works. ``published``: with in-flight updates, the digest of each version that the actor has.

        ``last_attempt`` returns the number of the newest Generate call. ``cancel`` and ``refuse``: see ``PendingTrajectories``.
        ``beside_training``: see ``Generation.start``.
        """
        self.batch, self.by_rule, self.beside_training = batch, by_rule, beside_training
        self._lock, self._published, self._last_attempt = lock, published, last_attempt
        self.cancel, self.refuse = partial(cancel, self), partial(refuse, self)
        self.waiting = list(batch.requests) if by_rule else by_expected_length(batch.requests)
        self.shares: dict[RemoteGenerator, list[GenerationRequest]] | None = None
        self.seen: set[TrajectoryId] = set()
        self.context = copy_context()
        """Context of the thread that started the work. Its calls belong to the trace of the step that was current there."""
        self.attempts: dict[int, Attempt] = {}
        """Generate calls that are in flight or have ended well. Trajectories of all others are abandoned."""
        self.failed: dict[RemoteGenerator, QuartetError] = {}
        """Generators that have failed at this work, although they respond. They get no more of it."""
        self._ended = threading.Event()
        self._error: QuartetError | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._ended.is_set()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` at each end of the work. A refused trajectory continues the work, which then ends again."""
        self._callbacks.append(callback)
        if self.done():
            callback(self)

    def result(self) -> int:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return len(self.batch.requests)

    def abandoned(self, trajectory: Trajectory) -> bool:
        return 0 < trajectory.attempt <= self._last_attempt() and trajectory.attempt not in self.attempts

    def wrong_origin(self, trajectory: Trajectory) -> str:
        attempt = self.attempts.get(trajectory.attempt)
        if attempt is None:
            return (
                f"generator {trajectory.generator or 'none'}: {trajectory.id} names attempt {trajectory.attempt}, which this run "
                "has not started; start the generators with the same version of Quartet"
            )
        if trajectory.generator != attempt.address:
            return (
                f"generator {attempt.address}: {trajectory.id} names the generator {trajectory.generator or 'none'}; expected "
                "the address at which it was called"
            )
        return ""

    @property
    def collected(self) -> bool:
        """True if all trajectories have arrived."""
        return all(request.id in self.seen for request in self.batch.requests)

    def abandon_all_of(self, address: str) -> None:
        """Abandon all Generate calls of a generator. Reopen the work if it has ended and trajectories are missing now."""
        for number in [number for number, attempt in self.attempts.items() if attempt.address == address]:
            self.abandon(number)
        if self.waiting and self.done():
            self.reopen()

    def abandon(self, attempt: int) -> None:
        """Wait for the trajectories of a Generate call again, unless they have arrived. Does nothing for an unknown attempt."""
        if attempt in self.attempts:
            self.wait_again_for(self.attempts.pop(attempt).requests)

    def wait_again_for(self, requests: Sequence[GenerationRequest]) -> None:
        """Put requests back, unless their trajectories have arrived."""
        self.waiting += [request for request in requests if request.id not in self.seen]

    def arrived(self, trajectory: Trajectory) -> bool:
        with self._lock:
            if self.abandoned(trajectory):
                return False
            self.seen.add(trajectory.id)
            return True

    def used_of(self, address: str) -> bool:
        """Return whether a trajectory that a generator has generated has arrived."""
        attempts = [attempt for attempt in self.attempts.values() if attempt.address == address]
        return any(request.id in self.seen for attempt in attempts for request in attempt.requests)

    def newer_weights(self) -> Mapping[int, bytes]:
        if self.batch.step == EVALUATION:
            return {}
        with self._lock:
            return {
                version: digest for version, digest in self._published.items() if version > self.batch.policy_version
            }

    def wanted_weights(self) -> tuple[int, bytes]:
        """Return the policy version and the digest with which generators begin a share."""
        newer = self.newer_weights()
        version = max(newer, default=self.batch.policy_version)
        return version, newer.get(version, self.batch.weights_digest)

    def share_of(self, generator: RemoteGenerator, ready: Sequence[RemoteGenerator]) -> list[GenerationRequest]:
        """Remove and return the requests that the generator gets next. ``ready``: the generators that may do this work."""
        if not self.by_rule:
            return take_by_load(self.waiting, len(ready)) if self.waiting else []
        if self.shares is None:
            parts = split_by_rule(self.waiting, len(ready))
            self.shares, self.waiting = dict(zip(ready, parts, strict=True)), []
        for lost in [other for other in self.shares if other not in ready or other in self.failed]:
            self.waiting += self.shares.pop(lost)
        if share := self.shares.pop(generator, []):
            return share
        if self.waiting:
            first, *rest = split_by_rule(self.waiting, sum(other.call is None for other in ready))
            self.waiting = [request for part in rest for request in part]
            return first
        # The others are busy with an earlier step.
        if longest := max(self.shares.values(), key=len, default=[]):
            first, longest[:] = split_by_rule(longest, 2)
            return first
        return []

    def error_of_all(self) -> QuartetError:
        """Return one error for those of all generators that have failed at this work."""
        first, *others = self.failed.values()
        return type(first)("; ".join(map(str, (first, *others)))) if others else first

    def end(self, error: QuartetError | None) -> None:
        """End the work. ``error`` is its failure."""
        self._error = error
        self._ended.set()
        for callback in [*self._callbacks]:
            callback(self)

    def reopen(self) -> None:
        """Continue after the end."""
        self._ended.clear()


def transfer_metrics(transfers: Sequence[WeightTransfer]) -> dict[str, float]:
    """Return the bytes, the longest duration and the ways of transfers, named as in metrics.jsonl."""
    seconds = [each.transfer_seconds + each.load_seconds for each in transfers]
    ways = [way for way in get_args(TransferWay) if way != "held"]
    return {
        "weight_update_bytes": sum(each.bytes for each in transfers),
        "weight_update_seconds": max(seconds, default=0.0),
        **{
            f"weight_transfers_{way.lower().replace(' ', '_')}": sum(each.way == way for each in transfers)
            for way in ways
        },
    }
