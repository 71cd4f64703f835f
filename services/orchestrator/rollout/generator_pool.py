"""Dispatch of work to the generators of a run: which weights they hold, and which part of a step each of them generates.

Everything happens in callbacks of calls that end, under one lock. Generators may join, leave and be killed at any time: the work
of a lost one is issued again to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from quartet.codec.generation import WeightUpdate
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties, GenerationBatch, GenerationRequest
from quartet.contract.status import GeneratorInfo, Role, ServiceStatus
from quartet.contract.trajectory import Trajectory
from quartet.contract.weights import WeightTransfer
from quartet.contract.work_split import split_by_rule, take_by_load
from quartet.errors import (
    BufferFailed,
    Cancelled,
    ComputationFailed,
    FailedPrecondition,
    InvalidRequest,
    MismatchError,
    QuartetError,
    ServiceUnavailable,
    StaleLeaderEpoch,
    WeightsChanged,
)
from quartet.rpc.clients import ActorClient
from quartet.rpc.pending_calls import PendingGeneration, PendingResult
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.services.orchestrator.rollout.generation import PendingTrajectories, published_digest
from quartet.services.orchestrator.rollout.generator_members import Member, Members
from quartet.services.orchestrator.rollout.generator_work import Attempt, Work
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call
from quartet.weight_transfer.tree import distribution_tree

log = structlog.get_logger()

MAX_FAILURES = 3
"""Failed calls without a generation in between, after which a generator gets no more work until it has been restarted."""
MAX_CHANGES = 1
"""Calls of one process at whose end its weights had changed, after which it gets no more work until it has been restarted."""
EVALUATION = 0
"""The step of an evaluation, which is always by one policy version."""
_OF_THE_WORK = (ComputationFailed, InvalidRequest)
"""Errors that a second generator raises, too, unless the first one has a defect."""


class GeneratorPool:
    """Generators in separate processes."""

    def __init__(
        self,
        config: Config,
        actor: ActorClient,
        note: Callable[[str], None],
        observe: CallObserver = ignore_call,
        credentials: Credentials = LOCAL,
    ) -> None:
        """``note`` shows a line to the user. ``observe`` receives every call."""
        self._config, self._actor, self._observe, self._note = config, actor, observe, note
        self._members = Members(config, actor, note, self._dispatch, credentials)
        self._lock = self._members.lock
        # In the order of their start, until all their trajectories have arrived, or until they fail.
        self._works: list[Work] = []
        self._transfers: list[WeightTransfer] = []
        self._changes = 0
        self._last_attempt = 0
        # With in-flight updates: the digest of each version that the actor has.
        self._published: dict[int, bytes] = {}
        # Generators that pull the weights of a digest, in the order in which they began.
        self._pulling: dict[bytes, list[str]] = {}
        self._closed = False

    def wait_until_ready(self, timeout: float, check_alive: Callable[[], None] = lambda: None) -> None:
        """See ``Members.wait_until_ready``."""
        self._members.wait_until_ready(timeout, check_alive)

    def statuses(self) -> dict[str, ServiceStatus]:
        """See ``Members.statuses``."""
        return self._members.statuses()

    def engines(self) -> list[EngineProperties]:
        """See ``Generation.engines``."""
        return self._members.engines()

    def generators(self) -> list[GeneratorInfo]:
        """See ``Generation.generators``."""
        with self._lock:
            return [member.info() for member in self._members.all() if not member.left]

    def take_metrics(self, policy_version: int) -> dict[str, float]:
        """See ``Generation.take_metrics``: the generators that are ready, and the weights that they have taken over."""
        with self._lock:
            transfers = [each for each in self._transfers if each.policy_version <= policy_version]
            self._transfers = [each for each in self._transfers if each.policy_version > policy_version]
            ready = len(self._members.ready())
            changes, self._changes = self._changes, 0
        return {
            "generators": ready,
            "weights_changed": changes,
            "weight_update_bytes": sum(each.bytes for each in transfers),
            "weight_update_seconds": max(
                (each.transfer_seconds + each.load_seconds for each in transfers), default=0.0
            ),
        }

    def leader_epochs(self) -> list[int]:
        """See ``Generation.leader_epochs``."""
        return [status.leader_epoch for status in self.statuses().values()]

    # Work

    def start(self, batch: GenerationBatch) -> tuple[GenerationBatch, PendingTrajectories]:
        """Start to generate a batch, after the batches before it. See ``Generation.start``."""
        batch = replace(batch, weights_digest=published_digest(self._actor, batch.policy_version))
        self._read_published()
        with self._lock:
            self._works = [work for work in self._works if not (work.done() and work.collected)]
            wanted = {
                *self._published.values(),
                batch.weights_digest,
                *(item.batch.weights_digest for item in self._works),
            }
            self._pulling = {digest: pulling for digest, pulling in self._pulling.items() if digest in wanted}
            engines = [member.status.engine for member in self._members.all() if member.status is not None]
            by_rule = all(engine is not None and engine.seeded and engine.batch_invariant for engine in engines)
            work = Work(self, batch, by_rule)
            self._works.append(work)
        self._dispatch()
        return batch, work

    def policy_updated(self) -> None:
        """See ``Generation.policy_updated``. Generators that do not generate get the version with their next work."""
        self._read_published()
        with self._lock:
            for member in self._members.all():
                self._update_in_flight(member)
        self._dispatch()

    def newer_weights(self, work: Work) -> Mapping[int, bytes]:
        """See ``PendingTrajectories.newer_weights``."""
        if work.batch.step == EVALUATION:
            return {}
        with self._lock:
            return {
                version: digest for version, digest in self._published.items() if version > work.batch.policy_version
            }

    def was_started(self, attempt: int) -> bool:
        """Return whether a Generate call with this number was started."""
        return 0 < attempt <= self._last_attempt

    def _read_published(self) -> None:
        if self._config.rollout.in_flight_updates:
            published = self._actor.status().published_weights
            with self._lock:
                self._published = published

    def arrived(self, work: Work, trajectory: Trajectory) -> bool:
        """See ``PendingTrajectories.arrived``."""
        with self._lock:
            if work.abandoned(trajectory):
                return False
            work.seen.add(trajectory.id)
            return True

    def cancel(self, work: Work) -> None:
        """Cancel the calls of a work."""
        with self._lock:
            calls = [member.call for member in self._members.all() if member.work is work and member.call]
            self._end(work, Cancelled("generation was cancelled"))
        for call in calls:
            call.cancel()

    def refuse(self, work: Work, trajectory: Trajectory, reason: str) -> None:
        """Give all work of a generator with wrong weights to the others, also what it has done for later steps.

        It gets no more until it has been restarted. Without effect if the work has failed, or if the call that generated the
        trajectory has been abandoned meanwhile.
        """
        call = None
        with self._lock:
            if work not in self._works or work.abandoned(trajectory):
                return
            if trajectory.attempt not in work.attempts:
                work.reopen()
                self._end(work, BufferFailed(f"rollout stream: {reason}"))
                return
            address = work.attempts[trajectory.attempt].address
            for each in self._works:
                each.abandon_all_of(address)
            # It may have left since.
            if (member := self._members.by_address.get(address)) is not None:
                call = self._refuse_member(member, reason)
        if call is not None:
            call.cancel()
        self._dispatch()

    def _refuse_member(self, member: Member, reason: str, exhausted: bool = False) -> PendingResult[Any] | None:
        """Take a generator's work away. Returns its call, to be cancelled."""
        self._members.refuse(member, reason, exhausted)
        call = member.call
        self._take_back(member)
        return call

    def close(self) -> None:
        """End all work and the connections."""
        self._closed = True
        for work in [*self._works]:
            self.cancel(work)
        self._members.close()

    # Dispatch

    def _dispatch(self) -> None:
        """Start the next call of every generator that is free. Fail the work that no generator can do."""
        with self._lock:
            active = [work for work in self._works if not work.done()]
            if self._closed:
                # Started by another thread after ``close``.
                for work in active:
                    self._end(work, Cancelled("generation was cancelled"))
                return
            ready = self._members.ready()
            if not ready and active:
                reasons = [f"{member.address}: {member.refused}" for member in self._members.all() if member.refused]
                causes = "; ".join(dict.fromkeys(each.last_error for each in self._members.all() if each.last_error))
                error: QuartetError = (
                    MismatchError("; ".join(reasons))
                    if reasons and all(each.refused and not each.exhausted for each in self._members.all())
                    else ServiceUnavailable(f"generators: none is ready: {causes or 'none has responded'}")
                )
                for work in active:
                    self._end(work, error)
                return
            for work in active:
                if work.failed and all(member in work.failed for member in ready):
                    self._end(work, work.error_of_all())
            for member in ready:
                if member.call is None and member.update is None:
                    self._start_next(member, ready)

    def _start_next(self, member: Member, ready: Sequence[Member]) -> None:
        for work in self._works:
            if not work.done() and member not in work.failed and (requests := self._share(work, member, ready)):
                member.work, member.requests = work, requests
                try:
                    self._start_call(member, work)
                except QuartetError as error:
                    self._failed(member, error)
                return

    def _share(self, work: Work, member: Member, ready: Sequence[Member]) -> list[GenerationRequest]:
        """Remove and return the requests that the generator gets next."""
        if not work.by_rule:
            return take_by_load(work.waiting, len(ready)) if work.waiting else []
        if work.shares is None:
            parts = split_by_rule(work.waiting, len(ready))
            work.shares, work.waiting = dict(zip(ready, parts, strict=True)), []
        for lost in [other for other in work.shares if not other.ready or other in work.failed]:
            work.waiting += work.shares.pop(lost)
        if share := work.shares.pop(member, []):
            return share
        if work.waiting:
            first, *rest = split_by_rule(work.waiting, sum(other.call is None for other in ready))
            work.waiting = [request for part in rest for request in part]
            return first
        # The others are busy with an earlier step.
        if longest := max(work.shares.values(), key=len, default=[]):
            first, longest[:] = split_by_rule(longest, 2)
            return first
        return []

    def _start_call(self, member: Member, work: Work) -> None:
        batch = work.batch
        version, digest = self._wanted(work)
        if member.digest == digest:
            self._last_attempt += 1
            member.attempt = self._last_attempt
            work.attempts[member.attempt] = Attempt(member.address, member.requests)
            share = replace(
                batch,
                requests=member.requests,
                attempt=member.attempt,
                generator=member.address,
                policy_version=version,
                weights_digest=digest,
            )
            call: PendingResult[Any] = work.context.run(member.client.generate, share)
            self._observe(f"{Role.GENERATOR} {member.address}", "generate", call)
        else:
            call = self._start_update(member, work, version, digest)
        member.call = call
        call.when_done(lambda: self._ended(member, call))

    def _wanted(self, work: Work) -> tuple[int, bytes]:
        """Return the policy version and the digest with which generators begin a share of a work."""
        newer = self.newer_weights(work)
        version = max(newer, default=work.batch.policy_version)
        return version, newer.get(version, work.batch.weights_digest)

    def _start_update(self, member: Member, work: Work, version: int, digest: bytes) -> PendingResult[WeightTransfer]:
        sources = self._sources(member, digest)
        update = WeightUpdate(self._config.run.name, work.batch.leader_epoch, version, digest, sources)
        call = work.context.run(member.client.update_weights, update)
        self._observe(f"{Role.GENERATOR} {member.address}", "update_weights", call)
        return call

    def _update_in_flight(self, member: Member) -> None:
        """Give a generator that generates the newest weights, if its engine can take them now."""
        work, engine = member.work, member.status.engine if member.status is not None else None
        if work is None or engine is None or not engine.in_flight_updates or not member.ready:
            return
        version, digest = self._wanted(work)
        if not isinstance(member.call, PendingGeneration) or member.update is not None or member.digest == digest:
            return
        try:
            update = self._start_update(member, work, version, digest)
        except QuartetError as error:
            self._failed(member, error)
            return
        member.update = update
        update.when_done(lambda: self._updated(member, update))

    def _updated(self, member: Member, update: PendingResult[WeightTransfer]) -> None:
        """Handle the end of an in-flight update. After a failure, the generator's work is taken back."""
        generation = None
        with self._lock:
            if member.update is not update or self._closed:
                return
            member.update = None
            try:
                result = update.result()
            except QuartetError as error:
                generation = member.call
                self._failed(member, error)
            else:
                self._transferred(member, result)
                # Another version may have been published meanwhile.
                self._update_in_flight(member)
        if generation is not None:
            generation.cancel()
        self._dispatch()

    def _transferred(self, member: Member, result: WeightTransfer) -> None:
        member.digest = result.weights_digest
        # A generator that had the weights already returns its last transfer.
        if result != member.transfer:
            self._transfers.append(result)
        self._members.transferred(member, result)

    def _sources(self, member: Member, digest: bytes) -> tuple[tuple[Role, str], ...]:
        """Return the processes from which a generator pulls weights: a tree below the actor."""
        root, all_pulling = self._actor.channel.address, self._pulling.setdefault(digest, [])
        if member.address not in all_pulling:
            all_pulling.append(member.address)
        holders = {other.address for other in self._members.all() if other.digest == digest}
        pulling = [address for address in all_pulling if address in self._members.by_address and address not in holders]
        # Those that have the version come first, with further children.
        tree = distribution_tree(root, [*sorted(holders), *pulling], holders)
        return tuple((Role.ACTOR if each == root else Role.GENERATOR, each) for each in tree[member.address])

    def _ended(self, member: Member, call: PendingResult[Any]) -> None:
        """Handle the end of a call."""
        with self._lock:
            if member.call is not call or self._closed:
                return
            member.call = None
            work = member.work
            assert work is not None
            try:
                result = call.result()
            except QuartetError as error:
                self._failed(member, error)
            else:
                if isinstance(result, int):
                    member.failures = 0
                    member.work, member.requests, member.attempt = None, [], 0
                    self._end_if_complete(work)
                else:
                    self._transferred(member, result)
                    if not work.done():
                        try:
                            self._start_call(member, work)
                        except QuartetError as error:
                            self._failed(member, error)
        self._dispatch()

    def _failed(self, member: Member, error: QuartetError) -> None:
        """Take the work of a generator back after a failed call."""
        work, member.digest = member.work, b""
        if isinstance(error, WeightsChanged):
            self._weights_changed(member, error)
        self._take_back(member)
        if isinstance(error, Cancelled):
            return
        member.last_error = str(error)
        if isinstance(error, StaleLeaderEpoch):
            # The next term of this orchestrator needs the epoch that the generator has seen, so it is asked again.
            member.status = None
            for each in [*self._works]:
                if work is not None and not each.done() and each.batch.leader_epoch <= work.batch.leader_epoch:
                    self._end(each, error)
            return
        member.failures += 1
        if isinstance(error, MismatchError) or member.changes > MAX_CHANGES:
            self._refuse_member(member, str(error))
            return
        if isinstance(error, WeightsChanged):
            return
        if isinstance(error, _OF_THE_WORK) and work is not None:
            log.warning("generator failed at its work", address=member.address, error=str(error))
            work.failed[member] = error
            if sum(type(each) is type(error) for each in work.failed.values()) > 1:
                self._end(work, work.error_of_all())
        elif not isinstance(error, FailedPrecondition):
            log.warning("generator lost", address=member.address, error=str(error))
            # The monitor asks it again. Until then the others do its work.
            member.status = None
        if member.failures > MAX_FAILURES:
            self._refuse_member(member, f"{member.failures} failures in a row, the last: {error}", exhausted=True)

    def _weights_changed(self, member: Member, error: WeightsChanged) -> None:
        """Discard what a generator has generated for active works: its weights were other ones at the end of a call.

        If some of it has arrived already, its scores may be on their way, so the work fails: the recovery begins the step again,
        with the same seeds.
        """
        member.changes += 1
        self._changes += 1
        log.error("weights of a generator changed", address=member.address, error=str(error))
        self._note(f"generator {member.address}: what it generated is discarded and generated again: {error}")
        for work in [each for each in self._works if not each.done()]:
            used = work.used_of(member.address)
            work.abandon_all_of(member.address)
            if used:
                self._end(work, error)

    def _take_back(self, member: Member) -> None:
        work = member.work
        if work is not None:
            work.abandon(member.attempt) if member.attempt else work.wait_again_for(member.requests)
        member.call, member.work, member.requests, member.attempt = None, None, [], 0
        if work is not None:
            self._end_if_complete(work)

    def _end_if_complete(self, work: Work) -> None:
        busy = any(member.work is work for member in self._members.all())
        if not busy and not work.waiting and not any((work.shares or {}).values()):
            self._end(work, None)

    def _end(self, work: Work, error: QuartetError | None) -> None:
        if error is not None and work in self._works:
            self._works.remove(work)
        if not work.done():
            work.end(error)
