"""The reward model behind gRPC: convert, delegate, convert."""

from __future__ import annotations

import grpc

from quartet import codec
from quartet.rpc.role import ModelRole
from quartet.types import Role
from quartet.v1 import reward_pb2, reward_pb2_grpc
from services.reward.reward import RewardModel


class RewardServicer(ModelRole[RewardModel], reward_pb2_grpc.RewardServiceServicer):
    """RewardService over a RewardModel."""

    role = Role.REWARD

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    def Score(self, request: reward_pb2.ScoreRequest, context: grpc.ServicerContext) -> reward_pb2.ScoreResponse:
        """One score for each prompt+response."""
        batch = codec.batch_from_proto(request.batch)
        scores = self.compute.run("score", context, lambda _: self.core.score(batch))
        return reward_pb2.ScoreResponse(scores=codec.tensor_to_proto(scores))
