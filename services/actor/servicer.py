"""The actor behind gRPC: convert, delegate, convert."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter

import grpc
import numpy as np

from quartet import codec
from quartet.config import MAX_RESPONSES
from quartet.errors import InvalidRequest
from quartet.rpc.base_servicers import TrainedRole
from quartet.rpc.compute_thread import ComputeThread
from quartet.services.actor.actor import Actor
from quartet.types import GenerationRequest, Role, SavedFile, ServiceStatus, TrajectoryId
from quartet.v1 import actor_pb2, actor_pb2_grpc


class ActorServicer(TrainedRole[Actor], actor_pb2_grpc.ActorServiceServicer):
    """ActorService over an Actor."""

    role = Role.ACTOR

    def __init__(
        self,
        core: Actor,
        compute: ComputeThread,
        threads: int,
        cut_off: Callable[[], bool],
        generation: ComputeThread | None = None,
    ) -> None:
        """``generation``: the thread that generates, where it is not the one of all other work. The rest as of TrainedRole."""
        super().__init__(core, compute, threads, cut_off)
        self._generation = generation or compute

    def status(self) -> ServiceStatus:
        """As of TrainedRole, of both threads."""
        status = super().status()
        if self._generation is self.compute:
            return status
        return replace(
            status,
            busy_seconds=status.busy_seconds | self._generation.busy_seconds(),
            work_pending=status.work_pending + self._generation.pending(),
        )

    def abandoned(self) -> tuple[str, float]:
        """As ``ComputeThread.abandoned``, of both threads."""
        return max(super().abandoned(), self._generation.abandoned(), key=itemgetter(1))

    def close(self) -> None:
        """Waits for the work in hand."""
        self._generation.close()
        super().close()

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        actor_pb2_grpc.add_ActorServiceServicer_to_server(self, server)

    def Generate(self, request: actor_pb2.GenerateRequest, context: grpc.ServicerContext) -> actor_pb2.GenerateResponse:
        """Generates trajectories into the rollout stream."""
        requests, sampling = _generation_requests(request), codec.sampling_from_proto(request.sampling)
        start = time.perf_counter()

        def begun() -> None:
            # Where the caller went away there is nobody to tell, and gRPC raises an error without a type.
            with suppress(Exception):
                context.send_initial_metadata(())

        trajectories, tokens = self._generation.run(
            "generate",
            context,
            lambda cancelled: self.core.generate(
                requests, sampling, request.seed, request.leader_epoch, request.policy_version, cancelled, begun
            ),
        )
        seconds = time.perf_counter() - start
        return actor_pb2.GenerateResponse(trajectories=trajectories, response_tokens=tokens, seconds=seconds)

    def LogProbs(
        self, request: actor_pb2.ActorServiceLogProbsRequest, context: grpc.ServicerContext
    ) -> actor_pb2.ActorServiceLogProbsResponse:
        """Log-probs under the current policy, or under the reference."""
        batch, temperature = codec.batch_from_proto(request.batch), codec.positive(request.temperature, "temperature")
        log_probs, version = self.compute.run(
            "log_probs",
            context,
            lambda _: (self.core.log_probs(batch, temperature, request.reference), self.core.policy_version),
        )
        return actor_pb2.ActorServiceLogProbsResponse(
            log_probs=codec.tensor_to_proto(log_probs), policy_version=version
        )

    def Update(
        self, request: actor_pb2.ActorServiceUpdateRequest, context: grpc.ServicerContext
    ) -> actor_pb2.ActorServiceUpdateResponse:
        """Takes one step's PPO update."""
        settings, loss = codec.optimization_from_proto(request.optimization), codec.policy_loss_from_proto(request.loss)
        result = self.compute.run(
            "update",
            context,
            lambda _: self.core.update(request.run, request.step, request.leader_epoch, settings, loss),
        )
        return actor_pb2.ActorServiceUpdateResponse(
            step=result.step, policy_version=result.policy_version, metrics=result.metrics
        )

    def Save(
        self, request: actor_pb2.ActorServiceSaveRequest, context: grpc.ServicerContext
    ) -> actor_pb2.ActorServiceSaveResponse:
        """Writes the policy."""
        kind = codec.save_kind_from_proto(request.kind)
        step = request.step if request.HasField("step") else None

        def snapshot() -> tuple[Callable[[], list[SavedFile]], int]:
            write = self.core.snapshot(request.run, request.leader_epoch, request.directory, kind, step)
            return write, self.core.policy_version

        files, version = self.save(context, snapshot)
        return actor_pb2.ActorServiceSaveResponse(
            files=[codec.saved_file_to_proto(file) for file in files], policy_version=version
        )

    def Restore(
        self, request: actor_pb2.ActorServiceRestoreRequest, context: grpc.ServicerContext
    ) -> actor_pb2.ActorServiceRestoreResponse:
        """Goes back to the policy of a checkpoint."""
        self.compute.run(
            "restore",
            context,
            lambda _: self.core.restore(request.run, request.step, request.leader_epoch, request.directory),
        )
        return actor_pb2.ActorServiceRestoreResponse(policy_version=self.core.policy_version)


def _generation_requests(request: actor_pb2.GenerateRequest) -> list[GenerationRequest]:
    lengths = codec.ints_from_proto(request.prompt_lengths, "prompt_lengths", len(request.prompts))
    if not len(lengths) or lengths.min() < 1 or not request.run or request.samples_per_prompt < 1:
        raise InvalidRequest(
            "generate: expected a run, samples_per_prompt of 1 or more, and prompts of 1 token or more"
        )
    if len(set(request.prompts)) != len(lengths):
        raise InvalidRequest("prompts: an index stands twice, its trajectories would have the same ids")
    if len(lengths) * request.samples_per_prompt > MAX_RESPONSES:
        raise InvalidRequest(f"generate: expected at most {MAX_RESPONSES} trajectories")
    samples = range(request.first_sample, request.first_sample + request.samples_per_prompt)
    if samples.stop > 2**32:
        raise InvalidRequest(f"first_sample {request.first_sample}: expected the last sample's index to be below 2^32")
    flat = codec.ints_from_proto(request.prompt_ids, "prompt_ids", int(lengths.sum(dtype=np.int64)))
    prompts = np.split(flat, np.cumsum(lengths)[:-1])
    return [
        GenerationRequest(TrajectoryId(request.run, request.step, index, sample), prompt)
        for index, prompt in zip(request.prompts, prompts, strict=True)
        for sample in samples
    ]
