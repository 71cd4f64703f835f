"""Dispatch of work to the generators of a run: which weights they hold, and which part of a step each of them generates.

Everything happens in callbacks of calls that end, under one lock. Generators may join, leave and be killed at any time: the work
of a lost one is issued again to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from quartet.codec.generation import WeightUpdate
from quartet.config.root import Config
from quartet.contract.generation import EngineProperties, GenerationBatch
from quartet.contract.status import GeneratorInfo, ProcessStatus, Role, ServiceStatus
from quartet.contract.trajectory import Trajectory
from quartet.contract.weights import PublishedWeights, TransferWay, WeightTransfer
from quartet.errors import (
    BufferFailed,
    Cancelled,
    ComputationFailed,
    FailedPrecondition,
    InvalidRequest,
    MismatchError,
    NoSessionsYet,
    QuartetError,
    ServiceUnavailable,
    StaleLeaderEpoch,
    WeightsChanged,
)
from quartet.preflight.generator_check import generator_mismatch
from quartet.rpc.clients import ActorClient, GenerationClient
from quartet.rpc.replica_set import ReplicaSet
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.services.orchestrator.rollout.generation import PendingTrajectories, RepeatabilityNotes, published_digest
from quartet.services.orchestrator.rollout.generator_work import (
    EVALUATION,
    Attempt,
    RemoteGenerator,
    Work,
    transfer_metrics,
)
from quartet.services.orchestrator.telemetry.step_profiler import CallObserver, ignore_call
from quartet.weight_transfer.tree import FAN_OUT, distribution_tree

log = structlog.get_logger()

MAX_FAILURES = 3
"""Failed calls without a generation in between, after which a generator gets no more work until it has been restarted."""
MAX_CHANGES = 1
"""Calls of one process at whose end its weights had changed, after which it gets no more work until it has been restarted."""
COPYING: frozenset[TransferWay] = frozenset({"process group", "full", "delta"})
"""Ways after which a generator has a copy that others can get."""
_OF_THE_WORK = (ComputationFailed, InvalidRequest)
"""Errors that a second generator raises, too, unless the first one has a defect."""


class GeneratorPool(ReplicaSet[RemoteGenerator]):
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

        def connect(address: str) -> RemoteGenerator:
            return RemoteGenerator(GenerationClient(address, config.timeouts, credentials))

        super().__init__(Role.GENERATOR, config.services.generators, connect, note)
        self.trace(actor.channel.tracer)
        self._config, self._actor, self._observe = config, actor, observe
        self._repeatability = RepeatabilityNotes(config, note)
        # Addresses of generators about whose failure to answer users a note was given.
        self._unanswered: set[str] = set()
        self._vocabulary_size: int | None = None
        self._actor_machine = ""
        # In the order of their start, until all their trajectories have arrived, or until they fail.
        self._works: list[Work] = []
        self._transfers: list[WeightTransfer] = []
        self._changes = 0
        self.last_attempt = 0
        """Number of the Generate call that was started last."""
        self.published: dict[int, bytes] = {}
        """With in-flight updates: the digest of each version that the actor has."""
        # Generators that pull the weights of a digest, in the order in which they began.
        self._pulling: dict[bytes, list[str]] = {}

    def wait_until_ready(self, timeout: float, check_alive: Callable[[], None] = lambda: None) -> None:
        """See ``Generation.wait_until_ready``. Waits until the other generators have responded, too.

        Failures until now no longer count: they may be due to a service that has been restarted.
        """
        actor = self._actor.status()
        self._vocabulary_size, self._actor_machine = actor.vocabulary_size, actor.machine
        with self.lock:
            for generator in self._all():
                generator.failures = 0
                if generator.exhausted:
                    generator.refused, generator.exhausted = "", False
        self._monitor()
        self._wait(timeout, check_alive)

    def statuses(self) -> dict[str, ServiceStatus]:
        """Return the last known status of each generator that responds, by address."""
        with self.lock:
            return {each.address: each.status for each in self._all() if each.status is not None}

    def engines(self) -> list[EngineProperties]:
        engines = (status.engine for _, status in sorted(self.statuses().items()))
        return list(dict.fromkeys(engine for engine in engines if engine is not None))

    def generators(self) -> list[GeneratorInfo]:
        with self.lock:
            return [generator.info() for generator in self._all() if not generator.left]

    def _responded(self, generator: RemoteGenerator, process: ProcessStatus, status: ServiceStatus) -> None:
        """Take note of the status of a generator. A refused process stays refused. Another one at its address may join."""
        with self._changed:
            same = process.instance_id == generator.instance_id
            if generator.left or (generator.refused and same):
                return
            if generator.ready:
                if same:
                    generator.status = status
                    self._give_notes()
                return
            if generator.refused:
                generator.refused, generator.exhausted, generator.failures = "", False, 0
            if not same:
                generator.changes = 0
            transfer = status.last_transfer
            generator.status, generator.instance_id = status, process.instance_id
            generator.digest, generator.transfer = transfer.weights_digest if transfer else b"", transfer
            if mismatch := generator_mismatch(self._config, process, status, self._vocabulary_size):
                self._refuse(generator, mismatch)
            else:
                log.info("generator joined", address=generator.address)
            self._give_notes()
            self._changed.notify_all()
            self._dispatch()

    def _give_notes(self) -> None:
        """Warn of engines on which the bits of the run depend. The caller holds the lock."""
        declared = [(each.status.engine, each.transfer) for each in self._ready() if each.status is not None]
        # Without a trial, an engine declares its guarantees once it has weights.
        engines = [engine for engine, transfer in declared if engine is not None and (engine.trial or transfer)]
        self._repeatability.give(engines)

    def take_metrics(self, policy_version: int) -> dict[str, float]:
        """See ``Generation.take_metrics``: the generators that are ready, and the weights that they have taken over."""
        with self.lock:
            transfers = [each for each in self._transfers if each.policy_version <= policy_version]
            self._transfers = [each for each in self._transfers if each.policy_version > policy_version]
            ready = len(self._ready())
            changes, self._changes = self._changes, 0
        return {"generators": ready, "weights_changed": changes, **transfer_metrics(transfers)}

    def peak_flops(self) -> float:
        peaks = [status.peak_flops for status in self.statuses().values()]
        return sum(peaks) / len(peaks) if peaks else 0.0

    def leader_epochs(self) -> list[int]:
        return [status.leader_epoch for status in self.statuses().values()]

    # Work

    def start(
        self, batch: GenerationBatch, beside_training: bool = False
    ) -> tuple[GenerationBatch, PendingTrajectories]:
        """Start to generate a batch, after the batches before it, but before those of later steps. See ``Generation.start``."""
        batch = replace(batch, weights_digest=published_digest(self._actor, batch.policy_version))
        self._read_published()
        with self.lock:
            self._works = [work for work in self._works if not (work.done() and work.collected)]
            wanted = {
                *self.published.values(),
                batch.weights_digest,
                *(item.batch.weights_digest for item in self._works),
            }
            self._pulling = {digest: pulling for digest, pulling in self._pulling.items() if digest in wanted}
            engines = [generator.status.engine for generator in self._all() if generator.status is not None]
            by_rule = all(engine is not None and engine.seeded and engine.batch_invariant for engine in engines)
            work = Work(
                batch,
                by_rule,
                self.lock,
                self.published,
                lambda: self.last_attempt,
                self.cancel,
                self.refuse,
                beside_training,
            )
            later = (index for index, each in enumerate(self._works) if _precedes(work, each))
            self._works.insert(next(later, len(self._works)), work)
        self._dispatch()
        return batch, work

    def policy_updated(self, leader_epoch: int, publication: PublishedWeights | None) -> None:
        """See ``Generation.policy_updated``."""
        self._read_published()
        vllm = self._config.rollout.vllm
        with self.lock:
            reserved = self._reserved(self._ready())
            for generator in self._all():
                self._update_in_flight(generator)
                # An engine that shares its device with training takes memory there when it loads.
                if publication is not None and generator not in reserved and not (vllm and vllm.release_memory):
                    self._update_idle(generator, leader_epoch, publication)
        self._dispatch()

    def _read_published(self) -> None:
        if self._config.rollout.in_flight_updates:
            published = self._actor.status().published_weights
            with self.lock:
                self.published.clear()
                self.published.update(published)

    def cancel(self, work: Work) -> None:
        """Cancel the calls of a work."""
        with self.lock:
            calls = [generator.call for generator in self._all() if generator.work is work and generator.call]
            self._end(work, Cancelled("generation was cancelled"))
        for call in calls:
            call.cancel()

    def refuse(self, work: Work, trajectory: Trajectory, reason: str) -> None:
        """Give all work of a generator with wrong weights to the others, also what it has done for later steps.

        It gets no more until it has been restarted. Without effect if the work has failed, or if the call that generated the
        trajectory has been abandoned meanwhile.
        """
        call = None
        with self.lock:
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
            if (generator := self._by_address.get(address)) is not None:
                call = self._exclude(generator, reason)
        if call is not None:
            call.cancel()
        self._dispatch()

    def _exclude(self, generator: RemoteGenerator, reason: str, exhausted: bool = False) -> Future[Any] | None:
        """Give a generator no more work until it has been restarted. Returns its call, to be cancelled.

        ``exhausted``: because of its failures, which count until the next ``wait_until_ready``.
        """
        self._refuse(generator, reason)
        generator.exhausted, generator.digest = exhausted, b""
        call = generator.call
        self._take_back(generator)
        return call

    def close(self) -> None:
        """End all work and the connections."""
        self._closed.set()
        for work in [*self._works]:
            self.cancel(work)
        super().close()

    # Dispatch

    def _dispatch(self) -> None:
        """Start the next call of every generator that is free. Fail the work that no generator can do."""
        with self.lock:
            active = [work for work in self._works if not work.done()]
            if self._closed.is_set():
                # Started by another thread after ``close``.
                for work in active:
                    self._end(work, Cancelled("generation was cancelled"))
                return
            ready = self._ready()
            if not ready and active:
                reasons = [
                    f"{generator.address}: {generator.refused}" for generator in self._all() if generator.refused
                ]
                causes = "; ".join(dict.fromkeys(each.last_error for each in self._all() if each.last_error))
                error: QuartetError = (
                    MismatchError("; ".join(reasons))
                    if reasons and all(each.refused and not each.exhausted for each in self._all())
                    else ServiceUnavailable(f"generators: none is ready: {causes or 'none has responded'}")
                )
                for work in active:
                    self._end(work, error)
                return
            for work in active:
                if work.failed and all(generator in work.failed for generator in self._eligible(work, ready)):
                    self._end(work, work.error_of_all())
            for generator in ready:
                if generator.call is None and generator.update is None:
                    self._start_next(generator, ready)

    def _start_next(self, generator: RemoteGenerator, ready: Sequence[RemoteGenerator]) -> None:
        for work in self._works:
            eligible = self._eligible(work, ready)
            if work.done() or generator not in eligible or generator in work.failed:
                continue
            if requests := work.share_of(generator, eligible):
                generator.work, generator.requests = work, requests
                try:
                    self._start_call(generator, work)
                except QuartetError as error:
                    self._failed(generator, error)
                return

    def _reserved(self, ready: Sequence[RemoteGenerator]) -> Sequence[RemoteGenerator]:
        """Return the generators that only evaluate: the last ones that are ready. At least one is left for training."""
        count = min(self._config.evaluation.generators, len(ready) - 1)
        return ready[len(ready) - count :] if count > 0 else ()

    def _eligible(self, work: Work, ready: Sequence[RemoteGenerator]) -> Sequence[RemoteGenerator]:
        """Return the generators that may do a work. With a single one, it does all work, that of training first."""
        reserved = self._reserved(ready)
        if not reserved or (work.batch.step == EVALUATION and not work.beside_training):
            # Training waits for the second kind.
            return ready
        return reserved if work.beside_training else [each for each in ready if each not in reserved]

    def _start_call(self, generator: RemoteGenerator, work: Work) -> None:
        batch = work.batch
        version, digest = work.wanted_weights()
        if generator.digest == digest:
            self.last_attempt += 1
            generator.attempt = self.last_attempt
            work.attempts[generator.attempt] = Attempt(generator.address, generator.requests)
            share = replace(
                batch,
                requests=generator.requests,
                attempt=generator.attempt,
                generator=generator.address,
                policy_version=version,
                weights_digest=digest,
            )
            call: Future[Any] = work.context.run(generator.client.generate, share)
            self._observe(
                f"{Role.GENERATOR} {generator.address}", "evaluate" if work.beside_training else "generate", call
            )
        else:
            phase = "evaluate" if work.beside_training else "update_weights"
            call = self._start_update(generator, work.context, batch.leader_epoch, version, digest, phase)
        generator.call = call
        call.add_done_callback(partial(self._ended, generator))

    def _start_update(
        self,
        generator: RemoteGenerator,
        context: Context,
        leader_epoch: int,
        version: int,
        digest: bytes,
        phase: str = "update_weights",
    ) -> Future[WeightTransfer]:
        sources = self._sources(generator, digest)
        update = WeightUpdate(self._config.run.name, leader_epoch, version, digest, sources)
        call = context.run(generator.client.update_weights, update)
        self._observe(f"{Role.GENERATOR} {generator.address}", phase, call)
        return call

    def _update_in_flight(self, generator: RemoteGenerator) -> None:
        """Give a generator that generates the newest weights, if its engine can take them now."""
        work, engine = generator.work, generator.status.engine if generator.status is not None else None
        if work is None or engine is None or not engine.in_flight_updates or not generator.ready:
            return
        version, digest = work.wanted_weights()
        if not generator.attempt or generator.update is not None or generator.digest == digest:
            return
        self._update_at_once(generator, work.context, work.batch.leader_epoch, version, digest)

    def _update_idle(self, generator: RemoteGenerator, leader_epoch: int, publication: PublishedWeights) -> None:
        """Give a generator without work the newest weights, so that its next work begins with them."""
        version, digest = publication.policy_version, publication.weights_digest
        if generator.ready and not (generator.call or generator.update) and generator.digest != digest:
            self._update_at_once(generator, copy_context(), leader_epoch, version, digest)

    def _update_at_once(
        self, generator: RemoteGenerator, context: Context, leader_epoch: int, version: int, digest: bytes
    ) -> None:
        try:
            update = self._start_update(generator, context, leader_epoch, version, digest)
        except QuartetError as error:
            self._failed(generator, error)
            return
        generator.update = update
        update.add_done_callback(partial(self._updated, generator))

    def _updated(self, generator: RemoteGenerator, update: Future[WeightTransfer]) -> None:
        """Handle the end of an update in flight or of an idle generator. After a failure, its work is taken back."""
        generation = None
        with self.lock:
            if generator.update is not update or self._closed.is_set():
                return
            generator.update = None
            try:
                result = update.result()
            except QuartetError as error:
                generation = generator.call
                self._failed(generator, error)
            else:
                self._transferred(generator, result)
                # Another version may have been published meanwhile.
                self._update_in_flight(generator)
        if generation is not None:
            generation.cancel()
        self._dispatch()

    def _transferred(self, generator: RemoteGenerator, result: WeightTransfer) -> None:
        generator.digest = result.weights_digest
        # A generator that had the weights already returns its last transfer.
        if result != generator.transfer:
            self._transfers.append(result)
        first, generator.transfer = generator.transfer is None, result
        if first:
            # An engine that calls a server knows the server's guarantees only after its first transfer.
            self._ask(generator)

    def _sources(self, generator: RemoteGenerator, digest: bytes) -> tuple[tuple[Role, str], ...]:
        """Return the processes from which a generator pulls weights: a tree below the actor."""
        root, all_pulling = self._actor.channel.address, self._pulling.setdefault(digest, [])
        if generator.address not in all_pulling:
            all_pulling.append(generator.address)
        # A generator that maps the weights of another process has nothing to send.
        copies = {each.address for each in self._all() if each.transfer and each.transfer.way in COPYING}
        current = {each.address for each in self._all() if each.digest == digest}
        holders = copies & current
        asked = [address for address in all_pulling if address in self._by_address and address not in current]
        # On a machine without the actor, the first one has the copy that the others map, also of the next version.
        generators = [*sorted(holders), *sorted(asked, key=lambda address: address not in copies)]
        machines = {other.address: other.status.machine for other in self._all() if other.status is not None}
        machines[root] = self._actor_machine
        # Only the actor sends through a process group.
        grouped = self._config.rollout.process_group != "none"
        fan_out = len(generators) if grouped else FAN_OUT
        tree = distribution_tree(root, generators, set() if grouped else holders, max(1, fan_out), machines)
        return tuple((Role.ACTOR if each == root else Role.GENERATOR, each) for each in tree[generator.address])

    def _ended(self, generator: RemoteGenerator, call: Future[Any]) -> None:
        """Handle the end of a call."""
        with self.lock:
            if generator.call is not call or self._closed.is_set():
                return
            generator.call = None
            work = generator.work
            assert work is not None
            try:
                result = call.result()
            except QuartetError as error:
                self._failed(generator, error)
            else:
                if generator.attempt:
                    generator.failures = 0
                    self._unanswered.discard(generator.address)
                    generator.work, generator.requests, generator.attempt = None, [], 0
                    self._end_if_complete(work)
                else:
                    self._transferred(generator, result)
                    if not work.done():
                        try:
                            self._start_call(generator, work)
                        except QuartetError as error:
                            self._failed(generator, error)
        self._dispatch()

    def _failed(self, generator: RemoteGenerator, error: QuartetError) -> None:
        """Take the work of a generator back after a failed call."""
        work, generator.digest = generator.work, b""
        if isinstance(error, WeightsChanged):
            self._weights_changed(generator, error)
        self._take_back(generator)
        if isinstance(error, (Cancelled, NoSessionsYet)):
            return
        generator.last_error = str(error)
        if isinstance(error, StaleLeaderEpoch):
            # The next term of this orchestrator needs the epoch that the generator has seen, so it is asked again.
            generator.status = None
            for each in [*self._works]:
                if work is not None and not each.done() and each.batch.leader_epoch <= work.batch.leader_epoch:
                    self._end(each, error)
            return
        if self._config.has_traffic and work is not None and not isinstance(error, FailedPrecondition):
            self._note_once(generator, error)
        # An idle generator repeats a failed update with its next work, and that counts.
        generator.failures += work is not None
        if isinstance(error, MismatchError) or generator.changes > MAX_CHANGES:
            self._exclude(generator, str(error))
            return
        if isinstance(error, WeightsChanged):
            return
        if isinstance(error, _OF_THE_WORK) and work is not None:
            log.warning("generator failed at its work", address=generator.address, error=str(error))
            work.failed[generator] = error
            if sum(type(each) is type(error) for each in work.failed.values()) > 1:
                self._end(work, work.error_of_all())
        elif not isinstance(error, FailedPrecondition):
            log.warning("generator lost", address=generator.address, error=str(error))
            # The monitor asks it again. Until then the others do its work.
            generator.status = None
        if generator.failures > MAX_FAILURES:
            self._exclude(generator, f"{generator.failures} failures in a row, the last: {error}", exhausted=True)

    def _note_once(self, generator: RemoteGenerator, error: QuartetError) -> None:
        """Give a note about a generator that does not answer users, once until it has finished work."""
        if generator.address not in self._unanswered:
            self._unanswered.add(generator.address)
            self._note(f"warning: generator {generator.address} does not answer users at the moment: {error}")

    def _weights_changed(self, generator: RemoteGenerator, error: WeightsChanged) -> None:
        """Discard what a generator has generated for active works: its weights were other ones at the end of a call.

        If some of it has arrived already, its scores may be on their way, so the work fails: the recovery begins the step again,
        with the same seeds.
        """
        generator.changes += 1
        self._changes += 1
        log.error("weights of a generator changed", address=generator.address, error=str(error))
        self._note(f"generator {generator.address}: what it generated is discarded and generated again: {error}")
        for work in [each for each in self._works if not each.done()]:
            used = work.used_of(generator.address)
            work.abandon_all_of(generator.address)
            if used:
                self._end(work, error)

    def _take_back(self, generator: RemoteGenerator) -> None:
        work = generator.work
        if work is not None:
            work.abandon(generator.attempt) if generator.attempt else work.wait_again_for(generator.requests)
        generator.call, generator.work, generator.requests, generator.attempt = None, None, [], 0
        if work is not None:
            self._end_if_complete(work)

    def _end_if_complete(self, work: Work) -> None:
        busy = any(generator.work is work for generator in self._all())
        if not busy and not work.waiting and not any((work.shares or {}).values()):
            self._end(work, None)

    def _end(self, work: Work, error: QuartetError | None) -> None:
        if error is not None and work in self._works:
            self._works.remove(work)
        if not work.done():
            work.end(error)


def _precedes(work: Work, other: Work) -> bool:
    """Return whether a new work is done before ``other``, which was started before it."""
    if work.batch.step == EVALUATION:
        return False
    return other.beside_training or work.batch.step < other.batch.step
