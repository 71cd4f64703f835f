"""CriticService: converts requests and responses, and runs the critic on its compute thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quartet.codec.messages import from_message, to_message
from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.contract.trajectory import TokenBatch
from quartet.contract.update import ValueLossSettings
from quartet.rpc.base_servicers import CommandHandler, TrainableServicer
from quartet.services.critic.critic import Critic
from quartet.v1 import critic_pb2, critic_pb2_grpc


class CriticServicer(TrainableServicer[Critic], critic_pb2_grpc.CriticServiceServicer):
    """CriticService for a Critic."""

    role = Role.CRITIC
    loss = ValueLossSettings

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        critic_pb2_grpc.add_CriticServiceServicer_to_server(self, server)

    def Values(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute the values of the states in which the response tokens were drawn."""
        values, version = self.run_command("values", request, context, self._values(request))
        return to_message(critic_pb2.ValuesResponse, values=values, policy_version=version)

    def handlers(self) -> dict[str, CommandHandler]:
        return {
            **super().handlers(),
            "values": lambda request: self._values(request)(),
        }

    def _values(self, request: Any) -> Callable[[], tuple[FloatArray, int]]:
        batch = from_message(TokenBatch, request.batch, "batch")
        return lambda: (self.core.values(batch), self.core.policy_version)
