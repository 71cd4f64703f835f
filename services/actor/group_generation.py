"""Generation by all ranks of an actor: rank 0 splits the trajectories, and each rank generates with its own engine.

The ranks call each other by gRPC, so that generation never waits for a collective of training.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from quartet.config.deployment import TimeoutsConfig
from quartet.contract.generation import GenerationBatch, GenerationRequest
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.work_split import split_by_rule
from quartet.errors import (
    Cancelled,
    EngineFailed,
    GroupWeightsChanged,
    NoResponse,
    QuartetError,
    ServiceUnavailable,
)
from quartet.models.workers.workers import Workers
from quartet.rpc.clients import GenerationClient
from quartet.rpc.compute_thread import ComputeThread
from quartet.rpc.security.allow_list import RANK_CALLERS
from quartet.rpc.security.credentials import Credentials
from quartet.rpc.server import Server
from quartet.services.actor.servicer import RankServicer
from quartet.services.generator.generator import Generator, Progress

POLL_SECONDS = 0.2
"""Interval at which rank 0 checks whether its caller is gone while other ranks generate."""


class GroupGeneration:
    """Generation by rank 0 and the other ranks at once."""

    def __init__(self, own: Generator, others: Sequence[GenerationClient] = (), server: Server | None = None) -> None:
        """``own`` generates in this process. ``others``: on rank 0, clients of the other ranks in their order.

        ``server``: on the other ranks, that by which rank 0 reaches ``own``.
        """
        self._own, self._others, self.server = own, others, server
        self._tokens = 0
        """Response tokens of all ranks."""

    def status(self) -> ServiceStatus:
        """Return the engine, and the tokens that all ranks have generated."""
        return replace(self._own.status(), tokens={"generated": self._tokens})

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate each prompt on one of the ranks. See ``Generator.generate``.

        Raises EngineFailed if another rank does not respond, GroupWeightsChanged if the weights of a rank have changed: the
        group must be restarted.
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
        self._calls: dict[int, Future[int]] = {}
        self._ended = threading.Event()

    def start(self, rank: int, client: GenerationClient, batch: GenerationBatch, on_progress: Progress) -> None:
        # Rank 0 cancels the call at the deadline of the caller, which comes first.
        call = self._calls[rank] = client.generate(batch, waits_for=1, on_progress=on_progress)
        call.add_done_callback(lambda _: self._ended.set())

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
            if isinstance(error, GroupWeightsChanged):
                raise GroupWeightsChanged(f"rank {rank}: {error}") from error
            if isinstance(error, ServiceUnavailable | NoResponse | EngineFailed):
                raise EngineFailed(f"rank {rank}: {error}") from error
            if error is not None:
                raise error

    def cancel(self) -> None:
        """Cancel the calls that have not ended."""
        for call in self._calls.values():
            if not call.done():
                call.cancel()


def _error_of(call: Future[int]) -> QuartetError | None:
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

    def of(self, rank: int) -> Progress:
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


def rank_host(nodes: int, environment: Mapping[str, str]) -> str:
    """Return the host at which this process listens for rank 0: loopback, or the address on the way to MASTER_ADDR.

    ``nodes``: number of machines of the group.
    """
    if nodes == 1:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])))  # Sends nothing.
        return str(probe.getsockname()[0])


def join_ranks(
    own: Generator,
    compute: ComputeThread,
    status: Callable[[], ServiceStatus],
    workers: Workers,
    nodes: int,
    timeouts: TimeoutsConfig,
    credentials: Credentials,
) -> GroupGeneration:
    """Return the generation of this rank: rank 0 uses all ranks, the others serve it. All ranks must call it.

    ``own`` generates on ``compute``. ``status``: that of the actor of this rank. For ``nodes`` see ``rank_host``. Raises
    ConfigError if a rank on another machine would listen without encryption.
    """
    if workers.rank:
        listen = f"{rank_host(nodes, os.environ)}:0"
        server = Server([RankServicer(own, compute, status)], listen, credentials, allowed=RANK_CALLERS)
        workers.exchange(server.address)
        return GroupGeneration(own, server=server)
    _, *addresses = workers.exchange("")
    return GroupGeneration(own, [GenerationClient(each, timeouts, credentials, Role.ACTOR) for each in addresses])
