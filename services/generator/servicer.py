"""GenerationService of a generator process: converts requests and responses, and runs the engine on its compute thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import structlog

from quartet.codec.generation import weight_update_from_proto
from quartet.codec.messages import to_message
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.weights import WeightTransfer
from quartet.errors import QuartetError, ServiceFailed, ServiceUnavailable
from quartet.rpc.base_servicers import ModelServicer, WeightServicer, stream_generation
from quartet.rpc.compute_thread import ComputeThread, remaining_time
from quartet.rpc.limits import MAX_CALL_SECONDS
from quartet.services.generator.generator import Generator
from quartet.services.generator.sessions.traffic_turns import MAX_SERVING_SECONDS
from quartet.v1 import generation_pb2, generation_pb2_grpc
from quartet.weight_transfer.messages import WeightPeer
from quartet.weight_transfer.receiver import WeightMirror

log = structlog.get_logger()

WAIT_SECONDS = 30.0
"""Time for which another generator may wait for a version before it sends it."""
WAKE_SECONDS, CLOSE_SECONDS = 0.5, 2.0
"""Longest wait for a turn of a user before a look whether the process ends. Time for turns to be finished then, or cancelled."""


class GeneratorServicer(ModelServicer[Generator], generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService for a Generator. Its weights come from other processes, and it passes them on."""

    role = Role.GENERATOR

    def __init__(
        self,
        core: Generator,
        compute: ComputeThread,
        threads: int,
        buffer_unreachable: Callable[[], bool],
        mirror: WeightMirror,
        peers: Callable[[Sequence[tuple[Role, str]]], list[WeightPeer]],
        updates: ComputeThread | None = None,
    ) -> None:
        """``peers`` returns clients of the processes at these addresses. See ModelServicer for the rest.

        ``updates`` loads weights while ``compute`` generates. By default ``compute`` does both.
        """
        super().__init__(core, compute, threads)
        self._updates = updates or compute
        self._buffer_unreachable, self._mirror, self._peers = buffer_unreachable, mirror, peers
        # Sessions of users are taken while the engine answers others.
        self._sessions = ComputeThread() if core.traffic is not None else None
        self._serving = None if core.traffic is None else _Serving(core, compute)

    def status(self) -> ServiceStatus:
        """Return the status of a model servicer, and whether the buffer is unreachable."""
        status = replace(super().status(), buffer_unreachable=self._buffer_unreachable(), machine=self._mirror.machine)
        if self._updates is self.compute:
            return status
        return replace(
            status,
            busy_seconds={**status.busy_seconds, **self._updates.busy_seconds()},
            work_pending=status.work_pending + self._updates.pending(),
        )

    def abandoned(self) -> tuple[str, float]:
        return max(self.compute.abandoned(), self._updates.abandoned(), key=lambda work: work[1])

    def failure(self) -> str:
        return self.compute.failure or self._updates.failure

    def register(self, server: grpc.Server) -> None:
        """Add this servicer and that of its weights to a server."""
        WeightServicer(self._mirror).register(server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def end_streams(self) -> None:
        """End the streams of weights that wait for a version or lend memory."""
        self._mirror.end_streams()

    def close(self) -> None:
        """Close the compute threads, the engine and its weights."""
        if self._serving is not None:
            self._serving.close()
        if self._sessions is not None:
            self._sessions.close()
        super().close()
        self._updates.close()
        self.core.close()
        self._mirror.close()

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Generate trajectories into the rollout stream. Yield an event at the start, with progress, and at the end."""
        compute = self._sessions if self._sessions is not None and request.HasField("episode") else self.compute
        return stream_generation(self.core, compute, request, context)

    def UpdateWeights(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Load a policy version into the engine, and read back its digest."""
        update = weight_update_from_proto(request)

        def work(_: Callable[[], bool]) -> WeightTransfer:
            try:
                return self.core.load(
                    update.run,
                    update.leader_epoch,
                    update.policy_version,
                    update.weights_digest,
                    lambda: self._mirror.pull(
                        self._peers(update.sources),
                        update.run,
                        update.policy_version,
                        update.weights_digest,
                        remaining_time(context),
                        # The first sources may receive the version at this moment, too.
                        WAIT_SECONDS if len(update.sources) > 1 else 0.0,
                    ),
                )
            finally:
                self._mirror.release()

        transfer = self._updates.run("update_weights", context, work)
        return to_message(generation_pb2.UpdateWeightsResponse, transfer=transfer)


class _Serving:
    """Thread that lets the engine answer users whenever one waits and the compute thread has no other work."""

    def __init__(self, core: Generator, compute: ComputeThread) -> None:
        self._core, self._compute = core, compute
        self._closed, self._cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more turns, and finish or else cancel those that have begun. What is answered is attested in both cases."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)
        self._cancelled.set()
        self._thread.join(CLOSE_SECONDS)
        traffic = self._core.traffic
        assert traffic is not None
        traffic.turns.close(ServiceUnavailable("the process ends"))

    def _run(self) -> None:
        traffic = self._core.traffic
        assert traffic is not None
        while not self._closed.is_set():
            if not traffic.turns.wait(WAKE_SECONDS):
                continue
            try:
                for _ in self._compute.stream("serve", _Process(), self._serve, lambda: None):
                    pass
            except QuartetError as error:
                log.warning("users are not answered", error=str(error))
                traffic.turns.fail(error)
            except Exception as error:
                log.error("users are not answered", exc_info=error)
                traffic.turns.fail(ServiceFailed(str(error)))

    def _serve(self, cancelled: Callable[[], bool], _: Callable[[None], None]) -> None:
        end = time.monotonic() + MAX_SERVING_SECONDS

        def stops() -> bool:
            # The other work may be an evaluation.
            return self._closed.is_set() or self._compute.pending() > 1 or time.monotonic() > end

        self._core.serve(stops, lambda: cancelled() or self._cancelled.is_set())


class _Process:
    """This process as the caller of its own work. See ``Caller``."""

    def time_remaining(self) -> float:
        return MAX_CALL_SECONDS

    def add_callback(self, _: Callable[[], None]) -> bool:
        return True
