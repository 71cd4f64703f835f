"""ActorService: converts requests and responses, and runs the actor on its compute threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import grpc

from quartet import codec
from quartet.rpc.base_servicers import TrainableServicer
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.actor.actor import Actor
from quartet.types import PolicyLossSettings, Role, ServiceStatus
from quartet.v1 import actor_pb2_grpc


class ActorServicer(TrainableServicer[Actor], actor_pb2_grpc.ActorServiceServicer):
    """ActorService for an Actor."""

    role = Role.ACTOR
    loss = PolicyLossSettings

    def __init__(
        self,
        core: Actor,
        compute: ComputeThread,
        threads: int,
        buffer_unreachable: Callable[[], bool],
        generation: ComputeThread | None = None,
    ) -> None:
        """``generation``: a separate compute thread for Generate. Defaults to ``compute``. See TrainableServicer for the rest."""
        super().__init__(core, compute, threads, buffer_unreachable)
        self._generation = generation or compute

    def status(self) -> ServiceStatus:
        """Return the status of a trainable servicer, with the measurements of both compute threads."""
        status = super().status()
        if self._generation is self.compute:
            return status
        return replace(
            status,
            busy_seconds=status.busy_seconds | self._generation.busy_seconds(),
            work_pending=status.work_pending + self._generation.pending(),
        )

    def abandoned(self) -> tuple[str, float]:
        """Return the longer abandoned work of both threads, see ``ComputeThread.abandoned``."""
        return max(super().abandoned(), self._generation.abandoned(), key=itemgetter(1))

    def close(self) -> None:
        """Close both compute threads."""
        self._generation.close()
        super().close()

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        actor_pb2_grpc.add_ActorServiceServicer_to_server(self, server)

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Generate trajectories into the rollout stream. Yield an event at the start and one at the end."""
        batch, start = codec.generation_batch_from_proto(request), time.perf_counter()

        def work(cancelled: Callable[[], bool], emit: Callable[[Any], None]) -> Any:
            trajectories, tokens = self.core.generate(
                batch.requests(),
                batch.sampling,
                batch.seed,
                batch.leader_epoch,
                batch.policy_version,
                cancelled,
                lambda: emit(codec.generation_started_to_proto()),
            )
            return codec.generation_finished_to_proto(trajectories, tokens, time.perf_counter() - start)

        return self._generation.stream("generate", context, work)

    def LogProbs(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute log-probs under the current policy, or under the reference."""
        batch, temperature, reference = codec.actor_log_probs_from_proto(request)
        log_probs, version = self.compute.run(
            "log_probs",
            context,
            lambda _: (self.core.log_probs(batch, temperature, reference), self.core.policy_version),
        )
        return codec.actor_log_probs_response_to_proto(log_probs, version)
