"""Generation by all ranks of an actor: rank 0 splits the trajectories, and each rank generates with its own engine.

The ranks call each other by gRPC, so that generation never waits for a collective of training.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import grpc

from quartet.config import TimeoutsConfig
from quartet.errors import Cancelled, EngineFailed, FailedPrecondition, NoResponse, QuartetError, ServiceUnavailable
from quartet.models.workers.workers import Workers
from quartet.rpc.base_servicers import GenerationCore, stream_generation
from quartet.rpc.clients import GenerationClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.pending_calls import PendingGeneration
from quartet.rpc.security.allow_list import RANK_CALLERS
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.services.generator.generator import Progress
from quartet.services.workers.processes import LOOPBACK
from quartet.types import GenerationBatch, GenerationRequest, Role, ServiceStatus
from quartet.v1 import generation_pb2_grpc
from quartet.work_split import split_by_rule

POLL_SECONDS = 0.2
"""Interval at which rank 0 checks whether its caller is gone while other ranks generate."""


class SeparateGeneration(GenerationCore, Protocol):
    """Generation in the actor's process with an engine that has its own weights."""

    def status(self) -> ServiceStatus:
        """Return the engine, and the tokens that it has generated."""


class GroupGeneration:
    """Generation by rank 0 and the other ranks at once. Runs on rank 0."""

    def __init__(self, own: SeparateGeneration, others: Sequence[GenerationClient]) -> None:
        """``own`` generates in this process. ``others``: clients of the other ranks, in their order."""
        self._own, self._others = own, others
        self._tokens = 0
        """Response tokens of all ranks."""

    def status(self) -> ServiceStatus:
        """See ``SeparateGeneration.status``."""
        return replace(self._own.status(), tokens={"generated": self._tokens})

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate each prompt on one of the ranks. See ``Generator.generate``.

        Raises EngineFailed if another rank does not respond: the group must be restarted.
        """
        own, *shares = split_by_rule(batch.requests, 1 + len(self._others))
        progress = _Totals(1 + len(self._others), on_progress)
        calls = _Calls()
        try:
            for rank, (client, share) in enumerate(zip(self._others, shares, strict=True), start=1):
                if share:
                    calls.start(rank, client, _share_of(batch, share), progress.of(rank))
            # The ranks start at once. If one of them fails, the others need not go to the end.
            self._own.generate(_share_of(batch, own), lambda: cancelled() or calls.failed(), on_start, progress.of(0))
            calls.wait(cancelled)
        except QuartetError:
            calls.raise_failure()
            raise
        finally:
            calls.cancel()
            self._tokens += progress.total()[1]
        return progress.total()


def _share_of(batch: GenerationBatch, requests: Sequence[GenerationRequest]) -> GenerationBatch:
    return replace(batch, requests=list(requests))


class _Calls:
    """Generate calls of the other ranks."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingGeneration] = {}
        self._ended = threading.Event()

    def start(
        self, rank: int, client: GenerationClient, batch: GenerationBatch, on_progress: Callable[[int, int], None]
    ) -> None:
        # Rank 0 cancels the call at the deadline of the caller, which comes first.
        call = self._calls[rank] = client.generate(batch, waits_for=1, on_progress=on_progress)
        call.when_done(self._ended.set)

    def failed(self) -> bool:
        """Return whether a call has failed."""
        return any(call.done() and _error_of(call) is not None for call in self._calls.values())

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait until all calls have ended, or one has failed. Raises Cancelled."""
        while not self.failed() and any(not call.done() for call in self._calls.values()):
            if cancelled():
                raise Cancelled("generate: the caller is gone")
            self._ended.wait(POLL_SECONDS)
            self._ended.clear()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of the first call that has failed, if there is one."""
        for rank, call in self._calls.items():
            error = _error_of(call) if call.done() else None
            if isinstance(error, ServiceUnavailable | NoResponse | EngineFailed):
                raise EngineFailed(f"rank {rank}: {error}") from error
            if error is not None:
                raise error

    def cancel(self) -> None:
        """Cancel the calls that have not ended."""
        for call in self._calls.values():
            if not call.done():
                call.cancel()


def _error_of(call: PendingGeneration) -> QuartetError | None:
    try:
        call.result()
    except QuartetError as error:
        return error
    return None


class _Totals:
    """Progress of all ranks together. Thread-safe."""

    def __init__(self, ranks: int, on_progress: Progress) -> None:
        self._done = [(0, 0)] * ranks
        self._on_progress, self._lock = on_progress, threading.Lock()

    def of(self, rank: int) -> Callable[[int, int], None]:
        """Return the observer of one rank."""

        def on_progress(trajectories: int, response_tokens: int) -> None:
            with self._lock:
                self._done[rank] = trajectories, response_tokens
                self._on_progress(*self._sums())

        return on_progress

    def total(self) -> tuple[int, int]:
        """Return the numbers of trajectories and response tokens."""
        with self._lock:
            return self._sums()

    def _sums(self) -> tuple[int, int]:
        return sum(each[0] for each in self._done), sum(each[1] for each in self._done)


class ServedRank:
    """Generation by a rank above 0, which serves it to rank 0."""

    def __init__(
        self,
        own: SeparateGeneration,
        compute: ComputeThread,
        status: Callable[[], ServiceStatus],
        listen: str,
        credentials: Credentials,
    ) -> None:
        """``own`` generates on ``compute``. ``status``: that of the actor of this rank. ``listen``: see ``Server``."""
        self._server = Server([_RankServicer(own, compute, status)], listen, credentials, allowed=RANK_CALLERS)
        self.address, self.generate, self.status = self._server.address, own.generate, own.status

    def close(self) -> None:
        """Stop serving. Calls in progress fail."""
        self._server.stop(0.0)


class _RankServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService of a rank above 0."""

    role = Role.ACTOR

    def __init__(self, core: GenerationCore, compute: ComputeThread, status: Callable[[], ServiceStatus]) -> None:
        self._core, self._compute, self.status = core, compute, status

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def abandoned(self) -> tuple[str, float]:
        """See ``ComputeThread.abandoned``."""
        return self._compute.abandoned()

    def close(self) -> None:
        """Close the compute thread."""
        self._compute.close()

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Generate a share of a step. Yield an event at the start, with progress, and at the end."""
        return stream_generation(self._core, self._compute, request, context)

    def UpdateWeights(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Raise FailedPrecondition. See ``ActorServicer.UpdateWeights``."""
        raise FailedPrecondition("update weights: the engine of the actor gets its weights without a transfer")


def rank_host(environment: Mapping[str, str]) -> str:
    """Return the host at which this process listens for rank 0: loopback, or with torchrun on several machines, the address
    that is on the way to MASTER_ADDR.
    """
    if environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE")) == environment.get("WORLD_SIZE"):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))  # Sends nothing.
        return str(probe.getsockname()[0])


def join_ranks(
    own: SeparateGeneration,
    compute: ComputeThread,
    status: Callable[[], ServiceStatus],
    workers: Workers,
    timeouts: TimeoutsConfig,
    credentials: Credentials,
) -> GroupGeneration | ServedRank:
    """Return the generation of this rank: rank 0 uses all ranks, the others serve it. All ranks must call it.

    For ``own``, ``compute`` and ``status`` see ``ServedRank``. Raises ConfigError if a rank on another machine would listen
    without encryption.
    """
    if workers.rank:
        served = ServedRank(own, compute, status, f"{rank_host(os.environ)}:0", credentials)
        workers.exchange(served.address)
        return served
    _, *addresses = workers.exchange("")
    return GroupGeneration(own, [GenerationClient(each, timeouts, credentials, Role.ACTOR) for each in addresses])
