"""ActorService: converts requests and responses, and runs the actor on its compute threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import grpc

from quartet.codec.checks import checked_temperature
from quartet.codec.generation import weight_update_from_proto
from quartet.codec.messages import from_message, to_message
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import PolicyLossSettings
from quartet.errors import FailedPrecondition
from quartet.rpc.base_servicers import (
    CommandHandler,
    Commands,
    GenerationCore,
    TrainableServicer,
    WeightServicer,
    stream_generation,
)
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.actor.actor import Actor
from quartet.v1 import actor_pb2, actor_pb2_grpc, generation_pb2_grpc
from quartet.weight_transfer.store import WeightStore


class ActorServicer(
    TrainableServicer[Actor], actor_pb2_grpc.ActorServiceServicer, generation_pb2_grpc.GenerationServiceServicer
):
    """ActorService and GenerationService for an Actor."""

    role = Role.ACTOR
    loss = PolicyLossSettings

    def __init__(
        self,
        core: Actor,
        compute: ComputeThread,
        threads: int,
        buffer_unreachable: Callable[[], bool],
        generation: ComputeThread | None = None,
        generator: GenerationCore | None = None,
        weights: WeightStore | None = None,
        commands: Commands | None = None,
    ) -> None:
        """``generator``: the generator that this process hosts, if it does. It runs on ``generation``, by default on ``compute``.

        ``weights``: the policy versions that generators in other processes may pull. See TrainableServicer for the rest.
        """
        super().__init__(core, compute, threads, buffer_unreachable, commands)
        self._generation, self._generator = generation or compute, generator
        self._weights = weights

    def status(self) -> ServiceStatus:
        """Return the status of a trainable servicer, with the measurements of both compute threads."""
        status = super().status()
        if self._generator is None:
            return status
        generator = self._generator.status()
        status = replace(
            status, engine=generator.engine, tokens=status.tokens | generator.tokens, turns=generator.turns
        )
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

    def failure(self) -> str:
        return super().failure() or self._generation.failure

    def end_streams(self) -> None:
        """End the streams of weights that wait for a version or lend memory."""
        if self._weights is not None:
            self._weights.end_streams()

    def close(self) -> None:
        """Close both compute threads, and the weights for other processes."""
        self._generation.close()
        super().close()
        if self._weights is not None:
            self._weights.close()

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server, and one for the weights."""
        if self._weights is not None:
            WeightServicer(self._weights).register(server)
        actor_pb2_grpc.add_ActorServiceServicer_to_server(self, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """Generate trajectories into the rollout stream. Yield an event at the start, with progress, and at the end."""
        if self._generator is None:
            raise FailedPrecondition(
                "generate: the generators of this run are in other processes; send it to one of them"
            )
        return stream_generation(self._generator, self._generation, request, context)

    def UpdateWeights(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Raise FailedPrecondition: an engine in this process gets its weights without a transfer."""
        weight_update_from_proto(request)
        raise FailedPrecondition("update weights: the engine of the actor gets its weights without a transfer")

    def LogProbs(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute log-probs under the current policy, or under the reference."""
        log_probs, version = self.run_command("log_probs", request, context, self._log_probs(request))
        return to_message(actor_pb2.ActorServiceLogProbsResponse, log_probs=log_probs, policy_version=version)

    def handlers(self) -> dict[str, CommandHandler]:
        return {
            **super().handlers(),
            "log_probs": lambda request: self._log_probs(request)(),
        }

    def _log_probs(self, request: Any) -> Callable[[], tuple[FloatArray, int]]:
        batch, temperature = from_message(TokenBatch, request.batch, "batch"), checked_temperature(request)
        return lambda: (self.core.log_probs(batch, temperature, request.reference), self.core.policy_version)


class RankServicer(generation_pb2_grpc.GenerationServiceServicer):
    """GenerationService of a rank above 0."""

    role = Role.ACTOR

    def __init__(self, core: GenerationCore, compute: ComputeThread, status: Callable[[], ServiceStatus]) -> None:
        self._core, self._compute, self.status = core, compute, status

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def abandoned(self) -> tuple[str, float]:
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
