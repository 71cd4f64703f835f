"""The critic behind gRPC: convert, delegate, convert."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from quartet import codec
from quartet.rpc.base_servicers import TrainedRole
from quartet.services.critic.critic import Critic
from quartet.types import Role, SavedFile
from quartet.v1 import critic_pb2, critic_pb2_grpc


class CriticServicer(TrainedRole[Critic], critic_pb2_grpc.CriticServiceServicer):
    """CriticService over a Critic."""

    role = Role.CRITIC

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        critic_pb2_grpc.add_CriticServiceServicer_to_server(self, server)

    def Values(self, request: critic_pb2.ValuesRequest, context: grpc.ServicerContext) -> critic_pb2.ValuesResponse:
        """Values of the states in which the response tokens were drawn."""
        batch = codec.batch_from_proto(request.batch)
        values, version = self.compute.run(
            "values", context, lambda _: (self.core.values(batch), self.core.policy_version)
        )
        return critic_pb2.ValuesResponse(values=codec.tensor_to_proto(values), policy_version=version)

    def Update(
        self, request: critic_pb2.CriticServiceUpdateRequest, context: grpc.ServicerContext
    ) -> critic_pb2.CriticServiceUpdateResponse:
        """Takes one step's value update."""
        settings, loss = codec.optimization_from_proto(request.optimization), codec.value_loss_from_proto(request.loss)
        result = self.compute.run(
            "update",
            context,
            lambda _: self.core.update(request.run, request.step, request.leader_epoch, settings, loss),
        )
        return critic_pb2.CriticServiceUpdateResponse(
            step=result.step, policy_version=result.policy_version, metrics=result.metrics
        )

    def Save(
        self, request: critic_pb2.CriticServiceSaveRequest, context: grpc.ServicerContext
    ) -> critic_pb2.CriticServiceSaveResponse:
        """Writes the value model."""
        kind = codec.save_kind_from_proto(request.kind)
        step = request.step if request.HasField("step") else None

        def snapshot() -> tuple[Callable[[], list[SavedFile]], int]:
            write = self.core.snapshot(request.run, request.leader_epoch, request.directory, kind, step)
            return write, self.core.policy_version

        files, version = self.save(context, snapshot)
        return critic_pb2.CriticServiceSaveResponse(
            files=[codec.saved_file_to_proto(file) for file in files], policy_version=version
        )

    def Restore(
        self, request: critic_pb2.CriticServiceRestoreRequest, context: grpc.ServicerContext
    ) -> critic_pb2.CriticServiceRestoreResponse:
        """Goes back to the value model of a checkpoint."""
        self.compute.run(
            "restore",
            context,
            lambda _: self.core.restore(request.run, request.step, request.leader_epoch, request.directory),
        )
        return critic_pb2.CriticServiceRestoreResponse(policy_version=self.core.policy_version)
