"""RewardService: converts requests and responses, and runs the reward source on its compute thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from quartet import codec
from quartet.errors import MismatchError
from quartet.failpoints import failpoint
from quartet.rewards.ensemble import EnsembleReward
from quartet.rewards.reward_source import RewardSource, never
from quartet.rpc.base_servicers import ModelServicer
from quartet.rpc.commands import CommandHandler
from quartet.types import Role, Scores
from quartet.v1 import reward_pb2_grpc


class RewardServicer(ModelServicer[RewardSource], reward_pb2_grpc.RewardServiceServicer):
    """RewardService for a RewardSource."""

    role = Role.REWARD

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    def close(self) -> None:
        """Close the compute thread and the reward source, which may have processes for functions."""
        super().close()
        self.core.close()

    def Score(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute one score for each prompt and response."""
        score = self._score(request)
        # Rewards of a group do not ask whether they are cancelled: the ranks would differ.
        scores = self.compute.run(
            "score", context, lambda cancelled: self._commands.run("score", request, lambda: score(cancelled))
        )
        return codec.scores_to_proto(scores)

    def handlers(self) -> dict[str, CommandHandler]:
        """See ``ModelServicer.handlers``."""
        return {"score": lambda request: self._score(request)(never)}

    def _score(self, request: Any) -> Callable[[Callable[[], bool]], Scores]:
        batch, fields, weights = codec.score_request_from_proto(request)
        source = self.core
        if weights and not isinstance(source, EnsembleReward):
            raise MismatchError("weights: this service has a single source; start it with the config of the run")

        def score(cancelled: Callable[[], bool]) -> Scores:
            failpoint("reward.scoring")
            if isinstance(source, EnsembleReward):
                return source.score(batch, fields, cancelled, weights or None)
            return source.score(batch, fields, cancelled)

        return score
