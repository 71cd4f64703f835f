"""A reward source behind gRPC: convert, delegate, convert."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from quartet import codec
from quartet.failpoints import failpoint
from quartet.rewards.reward_source import RewardSource
from quartet.rpc.base_servicers import ModelRole
from quartet.types import Role, Scores
from quartet.v1 import reward_pb2, reward_pb2_grpc


class RewardServicer(ModelRole[RewardSource], reward_pb2_grpc.RewardServiceServicer):
    """RewardService over a RewardSource."""

    role = Role.REWARD

    def register(self, server: grpc.Server) -> None:
        """Adds this servicer."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    def close(self) -> None:
        """Ends the processes of functions, too."""
        super().close()
        self.core.close()

    def Score(self, request: reward_pb2.ScoreRequest, context: grpc.ServicerContext) -> reward_pb2.ScoreResponse:
        """One score for each prompt+response."""
        batch, fields = codec.batch_from_proto(request.batch), list(request.fields)

        def work(cancelled: Callable[[], bool]) -> Scores:
            failpoint("reward.scoring")
            return self.core.score(batch, fields, cancelled)

        scores = self.compute.run("score", context, work)
        return codec.scores_to_proto(scores)
