"""Generation without gRPC: an engine, in the process of an actor or in its own, which writes to the rollout stream."""

from __future__ import annotations

import collections.abc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any, Protocol

import structlog

from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecords
from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.leader_fence import LeaderFence
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Trajectory, VersionSpan
from quartet.contract.weights import PublishedWeights, WeightTransfer
from quartet.engines.engine import CopyingEngine, Engine, EngineResponse, ServedModel, TurnEngine, TurnSource
from quartet.engines.request_checks import check_requests, check_response
from quartet.engines.stop_strings import StopStringCache
from quartet.errors import (
    BufferFailed,
    Cancelled,
    FailedPrecondition,
    GroupWeightsChanged,
    InvalidRequest,
    MismatchError,
    NoResponse,
    NoSessionsYet,
    QuartetError,
    ServiceFailed,
    ServiceUnavailable,
    WeightsChanged,
)
from quartet.services.generator.attestation import Attestation
from quartet.services.generator.episodes import EnvironmentAccess, generate_episodes
from quartet.services.generator.sessions.sessions import AgentAccess, generate_sessions
from quartet.services.generator.sessions.traffic import TrafficSessions
from quartet.services.generator.sessions.traffic_turns import ATTEST_SECONDS
from quartet.system.failpoints import failpoint
from quartet.weight_transfer.receiver import PulledWeights
from quartet.weight_transfer.tensors import WeightSet, combined_digest

log = structlog.get_logger()

FLUSH = 8
"""Finished trajectories per write to the rollout stream. More would delay scoring."""
_NOT_OF_THE_ENGINE = (Cancelled, InvalidRequest, FailedPrecondition, BufferFailed, ServiceUnavailable, NoResponse)
"""Errors that end a call although its engine works."""
POLL_SECONDS, EXPIRY_SECONDS = 0.2, 10.0
"""Seconds between two looks for sessions with a reward, and for sessions whose time is over."""


Pull = Callable[[], PulledWeights]
"""Function that brings the requested weights into host memory. Raises ServiceFailed if they are not those of the digest."""


Progress = Callable[[int, int], None]
"""Observer of a generation, which receives the numbers of trajectories and of their response tokens so far."""


class HeldWeights(Protocol):
    """Policy versions in the process of a generator."""

    def hold(self, version: int, digest: bytes) -> AbstractContextManager[tuple[WeightSet, Mapping[str, bytes]]]:
        """Hold a version inside the context: its weights, and the digest of each. Raises FailedPrecondition."""


class Generator:
    """An engine, the weights that it holds, and the rollout streams that it writes to.

    A version reaches the engine in one of three ways: ``load`` brings one from another process, ``copy`` takes one from an actor
    in the same process, or ``generate`` takes the one that a request names from the versions that this process holds.

    Not thread-safe, except ``status``; ``copy`` beside ``generate``; and ``load``, if the engine takes in-flight updates.
    """

    role = Role.GENERATOR

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        model: ServedModel,
        status: ServiceStatus,
        stream: Callable[[str], RolloutStream],
        environment: EnvironmentAccess | AgentAccess | TrafficSessions | None = None,
        held: HeldWeights | None = None,
        fence: LeaderFence | None = None,
    ) -> None:
        """``engine`` returns the engine: a restore of an actor replaces the one that shares its weights.

        ``status`` has the fields that never change. ``stream`` returns the rollout stream of a run by its name. ``environment``
        answers the turns of episodes, runs the agents that ask for them, or has the sessions of users. ``held``: the versions of
        this process, if requests take theirs from it. ``fence``: that of the process.
        """
        self._current_engine, self._model, self._status, self._stream = engine, model, status, stream
        self._environment, self._held_here = environment, held
        self._stop_strings = StopStringCache(model.decode, model.vocabulary_size)
        self._fence = fence or LeaderFence()
        # Generation and ``copy`` exclude each other. Both end without the other.
        self._generating = threading.Lock()
        # Held while the engine loads weights and they are verified.
        self._loading = threading.Lock()
        self._held: WeightTransfer | None = None
        self._verified: dict[bytes, int] = {}
        # Digest of the last load. Empty after a failure: what the engine holds is then unknown.
        self._loaded = b""
        self._is_copied = False
        # Error of ``serve`` that only an update of the weights repairs.
        self._serving_failure: QuartetError | None = None
        self._attestation = Attestation()
        self._tokens: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()

    @property
    def _engine(self) -> Engine:
        engine = self._current_engine()
        assert engine is not None
        return engine

    def load(self, run: str, leader_epoch: int, policy_version: int, digest: bytes, pull: Pull) -> WeightTransfer:
        """Bring a policy version into the engine, and verify what the engine holds afterwards. Idempotent by digest.

        Raises StaleLeaderEpoch for a lower leader epoch, MismatchError if the engine holds other weights afterwards, and the
        error of ``pull`` or of the engine.
        """
        with self._loading:
            self._fence.check(leader_epoch)
            return self._load(run, policy_version, digest, pull)

    def _load(self, run: str, policy_version: int, digest: bytes, pull: Pull) -> WeightTransfer:
        held = self._held
        # Shared weights have no digest.
        if held is not None and held.weights_digest == digest and (digest or held.policy_version == policy_version):
            # The same bytes can be two versions, such as after an update without epochs.
            self._held = replace(held, policy_version=policy_version)
            return self._held
        pulled = pull()
        self._held = None
        start = time.perf_counter()
        changed = pulled.changed if pulled.base_digest == self._loaded else frozenset(pulled.weight_set.tensors)
        self._loaded = b""
        digests = self._engine.load_weights(pulled.weight_set, changed)
        if self._engine.properties.digest == "read back":
            self._check_held(pulled, digests)
        else:
            pulled.verify()
        self._attestation.expect(digests)
        self._loaded = digest
        self._verified[digest] = policy_version
        self._held = WeightTransfer(
            policy_version,
            digest,
            pulled.source,
            pulled.bytes_received,
            pulled.way,
            pulled.seconds,
            time.perf_counter() - start,
        )
        if digest:
            log.info("weights loaded", run=run, version=policy_version, bytes=pulled.bytes_received, way=pulled.way)
            failpoint("generator.loaded")
        return self._held

    def _take(self, batch: GenerationBatch, held: HeldWeights) -> None:
        """Bring the version that a request names into the engine, from those of this process. Raises FailedPrecondition."""
        start = time.perf_counter()
        with self._loading:
            self._fence.check(batch.leader_epoch)
            with held.hold(batch.policy_version, batch.weights_digest) as (weights, digests):
                before = self._attestation.expected if self._loaded else {}
                changed = frozenset(name for name in digests if digests[name] != before.get(name))
                seconds = time.perf_counter() - start
                pulled = PulledWeights(weights, self._loaded, changed, 0, seconds, "this process", "held")
                self._load(batch.run, batch.policy_version, batch.weights_digest, lambda: pulled)

    def copy(self, policy_version: int, tensors: Iterable[tuple[str, Any]]) -> PublishedWeights:
        """Copy a version of an actor in this process into the engine, after the end of a generation.

        ``tensors``: name and torch tensor of every weight, made one after the other. All of them are consumed in any case.
        """
        start, size = time.perf_counter(), 0

        def counted() -> Iterator[tuple[str, Any]]:
            nonlocal size
            for name, value in tensors:
                size += value.nbytes
                yield name, value

        engine = self._engine
        assert isinstance(engine, CopyingEngine)
        with self._generating, self._loading:
            self._held, self._loaded, self._is_copied = None, b"", True
            digests = engine.copy_weights(counted())
            digest = combined_digest(digests)
            self._attestation.expect(digests)
            self._held = WeightTransfer(policy_version, digest)
            self._loaded, self._verified = digest, {digest: policy_version}
        return PublishedWeights(policy_version, digest, len(digests), size, time.perf_counter() - start)

    def _check_held(self, pulled: PulledWeights, held: Mapping[str, bytes]) -> None:
        digest, weights = combined_digest(held), pulled.weight_set
        if digest != weights.digest:
            # It is no fault of the engine if the source has changed the memory meanwhile.
            pulled.verify()
            raise MismatchError(
                f"engine {self._engine.properties.name}: holds weights of digest {digest.hex()} after it loaded version "
                f"{weights.version} of digest {weights.digest.hex()}; it has dropped or damaged part of the update; restart this "
                "generator, and report the engine's version if it happens again"
            )

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate trajectories into the rollout stream, each as it finishes. Return the numbers of trajectories and response
        tokens.

        Raises StaleLeaderEpoch for a lower leader epoch, FailedPrecondition if the engine does not hold the requested weights,
        MismatchError for a response by weights that were loaded meanwhile and are not those of their digest, and WeightsChanged
        if the weights are other ones at the end (GroupWeightsChanged if only a restart of the process brings them back): all
        trajectories of the call must then be discarded, also those that are written. After a failure of the engine, the next
        update loads every tensor: its server may have been restarted, for example.
        """
        if self.takes_sessions(batch):
            return self._take_sessions(batch, cancelled, on_start, on_progress)
        with self._generating:
            return self._generate(batch, cancelled, on_start, on_progress)

    @property
    def traffic(self) -> TrafficSessions | None:
        """The sessions of users, None in a run without them."""
        return self._environment if isinstance(self._environment, TrafficSessions) else None

    def takes_sessions(self, batch: GenerationBatch) -> bool:
        """Return whether the trajectories of a call are sessions of users, so that it needs no engine."""
        return self.traffic is not None and batch.episode is not None

    def serve(self, stops: Callable[[], bool], cancelled: Callable[[], bool]) -> None:
        """Generate the turns that users wait for, until none has come for a while, or until ``stops``.

        Raises FailedPrecondition without weights, WeightsChanged, and the error of the engine.
        """
        traffic = self.traffic
        assert traffic is not None
        with self._generating:
            with self._loading:
                held = self._held
                if held is None:
                    raise FailedPrecondition("this generator holds no weights yet")
                self._verified = {held.weights_digest: held.policy_version}
            batch = GenerationBatch(
                traffic.model,
                0,
                self._fence.epoch,
                (),
                traffic.sampling,
                traffic.seed,
                held.policy_version,
                held.weights_digest,
            )
            traffic.turns.begin(stops)
            try:
                self._serve(traffic, batch, cancelled)
            except Cancelled:
                raise
            except Exception as error:
                with self._loading:
                    self._held, self._loaded = None, b""
                self._serving_failure = error if isinstance(error, QuartetError) else ServiceFailed(str(error))
                # As for episodes: no one can attest the weights of these turns any more.
                traffic.end_period(attested=False)
                raise

    def _serve(self, traffic: TrafficSessions, batch: GenerationBatch, cancelled: Callable[[], bool]) -> None:
        """Generate turns, and read the weights back every ATTEST_SECONDS and at the end, also if it is cancelled."""
        start = time.perf_counter()
        try:
            with closing(self._answers(traffic, cancelled)) as answers:
                for response in answers:
                    if response is not None:
                        traffic.turns.finish(self._trajectory(response, batch))
                        continue
                    seconds = time.perf_counter() - start
                    # An update may take long. After it, the next turn is early enough.
                    attested = self._attest(batch, seconds, wait=False) if seconds >= ATTEST_SECONDS else None
                    if attested is not None:
                        traffic.end_period(attested)
                        start = time.perf_counter()
        except Cancelled:
            traffic.end_period(bool(self._attest(batch, time.perf_counter() - start)))
            raise
        traffic.end_period(bool(self._attest(batch, time.perf_counter() - start)))

    def _answers(
        self, traffic: TrafficSessions, cancelled: Callable[[], bool]
    ) -> collections.abc.Generator[EngineResponse | None]:
        """Yield the turns that users wait for, and None whenever the weights can be read back."""
        engine, turns = self._engine, traffic.turns
        if isinstance(engine, TurnEngine):
            for response in engine.generate_turns(
                traffic.longest_requests(), traffic.sampling, traffic.seed, cancelled, turns
            ):
                yield response
                yield None
            return
        # Those that arrive meanwhile wait for the end of those before them.
        while turns.open:
            if requests := turns.take(wait=True):
                yield from engine.generate(requests, traffic.sampling, traffic.seed, cancelled)
                yield None

    def _take_sessions(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None],
        on_progress: Progress,
    ) -> tuple[int, int]:
        """Write the trajectories of sessions with a reward to the rollout stream, as rewards arrive."""
        traffic = self.traffic
        assert traffic is not None
        with self._loading:
            self._fence.check(batch.leader_epoch)
            if self._held is None:
                raise FailedPrecondition("this generator holds no weights; update them first")
        on_start()
        writer = TrajectoryWriter(self._stream(batch.run), batch, on_progress)
        waiting = deque(sorted(request.id for request in batch.requests))
        start = expiry = time.monotonic()
        while waiting:
            if cancelled():
                raise Cancelled("generation was cancelled by its caller")
            if time.monotonic() > start + traffic.max_wait:
                # The caller repeats it, and the sessions so far keep their places.
                raise NoSessionsYet(f"{len(waiting)} sessions with a reward are missing")
            self._fence.check(batch.leader_epoch)
            if (failure := self._serving_failure) is not None:
                self._serving_failure = None
                raise failure
            if time.monotonic() >= expiry:
                traffic.expire()
                expiry = time.monotonic() + EXPIRY_SECONDS
            trajectory = traffic.take(waiting[0])
            if trajectory is None:
                time.sleep(POLL_SECONDS)
                continue
            writer.add(replace(trajectory, generator=batch.generator))
            waiting.popleft()
        return writer.finish()

    def _generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None],
        on_progress: Progress,
    ) -> tuple[int, int]:
        if self._held_here is not None:
            self._take(batch, self._held_here)
        with self._loading:
            self._fence.check(batch.leader_epoch)
            self._check_requested(batch)
            self._verified = {batch.weights_digest: batch.policy_version}
        requests = check_requests(self._model, batch.requests, batch.sampling)
        self._stop_strings.of(batch.sampling)
        on_start()
        writer = TrajectoryWriter(self._stream(batch.run), batch, on_progress)
        records, is_attested = self._records_of(batch), False
        start = time.perf_counter()
        try:
            try:
                if batch.episode is None:
                    for trajectory in self._responses(requests, batch, cancelled):
                        writer.add(trajectory)
                else:
                    self._generate_episodes(requests, batch, cancelled, writer, records)
            except _NOT_OF_THE_ENGINE:
                if records is not None:
                    # A later call continues after them.
                    self._attest(batch, time.perf_counter() - start)
                    is_attested = True
                raise
            self._attest(batch, time.perf_counter() - start)
            is_attested = True
            if self._held_here is None and not self._is_copied:
                # Without effect unless the engine shares its device with training. In an actor's process, updates ask for it.
                self._engine.sleep()
            return writer.finish()
        except Exception as error:
            if records is not None and not is_attested:
                self._revoke(records, batch)
            if not isinstance(error, (Cancelled, InvalidRequest, FailedPrecondition)):
                with self._loading:
                    self._held, self._loaded = None, b""
            raise

    def _attest(self, batch: GenerationBatch, seconds: float, wait: bool = True) -> bool | None:
        """Read the weights back after a generation of ``seconds``. Raises WeightsChanged.

        Return False if an update has failed meanwhile, so that no one can attest the weights before it. Without ``wait``, do
        nothing during an update, and return None.
        """
        if not self._loading.acquire(blocking=wait):
            return None
        try:
            if self._held is None:
                return False
            start = time.perf_counter()
            changed, read = self._attestation.changed(self._engine, seconds)
            log.debug("weights attested", tensors=read, seconds=time.perf_counter() - start, of_seconds=seconds)
        finally:
            self._loading.release()
        if changed:
            log.error(
                "weights changed", run=batch.run, step=batch.step, version=batch.policy_version, tensors=changed[:10]
            )
            kind = GroupWeightsChanged if self._is_copied else WeightsChanged
            raise kind(
                f"engine {self._engine.properties.name}: {len(changed)} of {read} tensors that were read back, the first "
                f"{changed[0]}, have changed since version {batch.policy_version} was loaded and verified; the trajectories of "
                "this call are discarded; if it happens again, check the memory of this machine, and report the engine's version"
            )
        return True

    def _records_of(self, batch: GenerationBatch) -> TurnRecords | None:
        """Return the turn records of a call, None for a call without turns."""
        if batch.episode is None or self._environment is None or self._environment.records is None:
            return None
        return self._environment.records(batch)

    def _revoke(self, records: TurnRecords, batch: GenerationBatch) -> None:
        """Remove the records of a call whose weights are not attested: they have changed, or the engine has failed."""
        try:
            records.revoke()
        except QuartetError as error:  # The cause of the end counts.
            log.error("turn records not removed", run=batch.run, step=batch.step, error=str(error))

    def _responses(
        self, requests: Sequence[GenerationRequest], batch: GenerationBatch, cancelled: Callable[[], bool]
    ) -> Iterator[Trajectory]:
        for response in self._engine.generate(requests, batch.sampling, batch.seed, cancelled):
            yield self._trajectory(response, batch)

    def _generate_episodes(
        self,
        requests: Sequence[GenerationRequest],
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        writer: TrajectoryWriter,
        records: TurnRecords | None,
    ) -> None:
        engine, access = self._engine, self._environment
        assert not isinstance(access, TrafficSessions)
        if access is not None and records is not None:
            access = replace(access, records=lambda _: records)

        def generate(turns: Sequence[GenerationRequest]) -> Iterator[Trajectory]:
            return self._responses(turns, batch, cancelled)

        def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
            assert isinstance(engine, TurnEngine)
            for response in engine.generate_turns(prompts, batch.sampling, batch.seed, cancelled, turns):
                yield self._trajectory(response, batch)

        later = generate_turns if isinstance(engine, TurnEngine) else None
        turns: Counter[str] = Counter()
        try:
            if isinstance(access, AgentAccess):
                generate_sessions(access, batch, requests, generate, later, writer.add, cancelled, turns)
                return
            generate_episodes(
                access,
                batch,
                requests,
                self._model.vocabulary_size,
                generate,
                later,
                writer.add,
                cancelled,
                turns,
            )
        finally:
            self._turns.update(turns)
            counts = {name: turns[name] for name in ("generated", "recorded")}
            log.info("turns of episodes", run=batch.run, step=batch.step, **counts)

    def _check_requested(self, batch: GenerationBatch) -> None:
        held = self._held
        if held is None or (held.policy_version, held.weights_digest) != (batch.policy_version, batch.weights_digest):
            has = f"version {held.policy_version} of digest {held.weights_digest.hex()}" if held else "none"
            raise FailedPrecondition(
                f"generate with version {batch.policy_version} of digest {batch.weights_digest.hex() or 'none'}: this generator "
                f"holds {has}; update its weights first"
            )

    def _trajectory(self, response: EngineResponse, batch: GenerationBatch) -> Trajectory:
        """Return a response as a trajectory with the versions that generated it."""
        checked = check_response(
            response,
            self._model,
            batch.sampling,
            batch.policy_version,
            self._engine.properties.name,
            self._stop_strings.of(batch.sampling),
        )
        self._tokens["generated"] += len(checked.policy_ids)
        checked = replace(checked, weights_digest=batch.weights_digest, generator=batch.generator)
        if not response.spans:
            return checked
        spans = tuple(self._verified_span(response, span) for span in response.spans)
        last = spans[-1]
        return replace(
            checked,
            policy_version=last.policy_version,
            weights_digest=last.weights_digest,
            version_spans=spans if len(spans) > 1 else (),
        )

    def _verified_span(self, response: EngineResponse, span: VersionSpan) -> VersionSpan:
        if span.weights_digest not in self._verified:
            with self._loading:
                pass  # The engine may generate with an update that is not verified yet.
        if span.weights_digest not in self._verified:
            raise MismatchError(
                f"engine {self._engine.properties.name}: {span.tokens} tokens of {response.request.id} are of version "
                f"{span.policy_version} and digest {span.weights_digest.hex()}, which this generator could not verify; they are "
                "discarded"
            )
        # The same bytes can be two versions. The orchestrator's number counts.
        return replace(span, policy_version=self._verified[span.weights_digest])

    def close(self) -> None:
        """Release the engine, and end all agents."""
        if isinstance(self._environment, AgentAccess | TrafficSessions):
            self._environment.close()
        self._engine.close()

    def status(self) -> ServiceStatus:
        """Return the status of the generator."""
        engine = self._current_engine()
        return replace(
            self._status,
            policy_version=self._held.policy_version if self._held else 0,
            leader_epoch=self._fence.epoch,
            tokens=dict(self._tokens),
            turns=dict(self._turns),
            engine=engine.properties if engine is not None else None,
            last_transfer=self._held,
        )


class TrajectoryWriter:
    """Writer of the trajectories of one generation to the rollout stream, a few at a time."""

    def __init__(self, stream: RolloutStream, batch: GenerationBatch, on_progress: Progress) -> None:
        """``batch`` has the leader epoch and the attempt."""
        self._stream, self._batch, self._on_progress = stream, batch, on_progress
        self._waiting: list[Trajectory] = []
        self._written = self._tokens = 0

    def add(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory."""
        if not self._tokens:
            failpoint("actor.generating")
        self._tokens += len(trajectory.policy_ids)
        self._waiting.append(replace(trajectory, attempt=self._batch.attempt))
        if len(self._waiting) == FLUSH:
            self._flush()

    def finish(self) -> tuple[int, int]:
        """Write the rest. Return the numbers of trajectories and response tokens."""
        if self._waiting:
            self._flush()
        return self._written, self._tokens

    def _flush(self) -> None:
        self._stream.append(self._waiting, self._batch.leader_epoch)
        self._written += len(self._waiting)
        self._waiting = []
        self._on_progress(self._written, self._tokens)
