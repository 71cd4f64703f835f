"""RewardService: converts requests and responses, and runs the reward source on its compute thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import grpc

from quartet.codec.scoring import score_request_from_proto, scores_to_proto
from quartet.contract.status import Role
from quartet.contract.trajectory import Scores, TokenBatch
from quartet.errors import Cancelled, DeadlinePassed, MismatchError, QuotaExceeded
from quartet.rewards.ensemble import EnsembleReward
from quartet.rewards.reward_source import RewardSource, never, score_in_units
from quartet.rpc.base_servicers import CommandHandler, Commands, ModelServicer
from quartet.rpc.compute_thread import CallerState, ComputeThread, remaining_time
from quartet.rpc.security.credentials import caller_run
from quartet.services.reward.sharing import SharedCall, SharedTurns
from quartet.system.failpoints import failpoint
from quartet.v1 import reward_pb2_grpc

REFUSAL_SECONDS = 0.2
"""Time until a refused call is answered. A connection has few calls beyond its quota, see ``quartet.rpc.limits.SPARE_CALLS``."""


class RewardServicer(ModelServicer[RewardSource], reward_pb2_grpc.RewardServiceServicer):
    """RewardService for a RewardSource."""

    role = Role.REWARD

    def __init__(
        self,
        core: RewardSource,
        compute: ComputeThread,
        threads: int,
        commands: Commands | None = None,
        shared: SharedTurns | None = None,
    ) -> None:
        """``shared``: the quotas and turns of the runs that share the service. See ModelServicer for the rest."""
        super().__init__(core, compute, threads, commands)
        self.shared = shared

    def register(self, server: grpc.Server) -> None:
        """Add this servicer to a server."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    def close(self) -> None:
        """Close the compute thread and the reward source, which may have processes for functions."""
        super().close()
        self.core.close()

    def Score(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Compute one score for each prompt and response. Raises QuotaExceeded if the caller's run has used its quota."""
        if self.shared is not None:
            return scores_to_proto(self._score_shared(self.shared, request, context))
        score = self._score(request)
        # Rewards of a group do not ask whether they are cancelled: the ranks would differ.
        scores = self.compute.run(
            "score", context, lambda cancelled: self._commands.run("score", request, lambda: score(cancelled))
        )
        return scores_to_proto(scores)

    def handlers(self) -> dict[str, CommandHandler]:
        return {"score": lambda request: self._score(request)(never)}

    def _score(self, request: Any) -> Callable[[Callable[[], bool]], Scores]:
        batch, fields, weights = self._read(request)
        source = self.core

        def score(cancelled: Callable[[], bool]) -> Scores:
            _reach_scoring()
            if isinstance(source, EnsembleReward):
                return source.score(batch, fields, cancelled, weights or None)
            return source.score(batch, fields, cancelled)

        return score

    def _read(self, request: Any) -> tuple[TokenBatch, list[str], Mapping[str, float]]:
        """Return the batch, its fields and the weights of a request. Raises InvalidRequest and MismatchError."""
        batch, fields, weights = score_request_from_proto(request)
        if weights and not isinstance(self.core, EnsembleReward):
            raise MismatchError("weights: this service has a single source; start it with the config of the run")
        return batch, fields, weights

    def _score_shared(self, shared: SharedTurns, request: Any, context: grpc.ServicerContext) -> Scores:
        batch, fields, weights = self._read(request)
        try:
            call = shared.admit(caller_run(context), len(batch))
        except QuotaExceeded:
            # A caller that ignores the time to wait would keep the process busy with refusals.
            time.sleep(REFUSAL_SECONDS)
            raise
        scores: Scores | None = None
        try:
            scores = self._compute_in_turns(shared, call, self._units(request, batch, fields, weights), context)
            return scores
        finally:
            shared.leave(call, scored=scores is not None)

    def _units(
        self, request: Any, batch: TokenBatch, fields: list[str], weights: Mapping[str, float]
    ) -> Callable[[Callable[[], bool]], Generator[None, None, Scores]]:
        """Return the function that starts the computation. The ranks of a group compute a call as one unit."""
        source = self.core

        def whole(cancelled: Callable[[], bool]) -> Generator[None, None, Scores]:
            score = self._score(request)
            return self._commands.run("score", request, lambda: score(cancelled))
            yield  # A generator without a pause.

        def divided(cancelled: Callable[[], bool]) -> Generator[None, None, Scores]:
            _reach_scoring()
            if isinstance(source, EnsembleReward):
                return (yield from source.score_in_units(batch, fields, cancelled, weights or None))
            return (yield from score_in_units(source, batch, fields, cancelled))

        return whole if self._commands.size > 1 else divided

    def _compute_in_turns(
        self,
        shared: SharedTurns,
        call: SharedCall,
        start: Callable[[Callable[[], bool]], Generator[None, None, Scores]],
        context: grpc.ServicerContext,
    ) -> Scores:
        caller = CallerState(remaining_time(context))

        def on_end() -> None:
            caller.mark_gone()
            call.turn.set()  # Wakes the thread below.

        if not context.add_callback(on_end):
            raise Cancelled("score: the caller is gone")
        units = start(caller.is_gone)
        # The end of a unit clears a turn that ``on_end`` has set during the unit.
        while not caller.is_gone():
            if not call.turn.wait(remaining_time(context)):
                raise DeadlinePassed("score: the deadline passed")
            if caller.is_gone():
                break
            scores = self.compute.run("score", context, lambda _: _next_unit(units, shared, call))
            if scores is not None:
                return scores
        raise Cancelled("score: the caller is gone")


def _reach_scoring() -> None:
    failpoint("reward.scoring")


def _next_unit(units: Generator[None, None, Scores], shared: SharedTurns, call: SharedCall) -> Scores | None:
    """Compute a unit of work and end the turn. Return the scores if it was the last one."""
    start = time.perf_counter()
    try:
        next(units)
    except StopIteration as end:
        scores: Scores = end.value
        return scores
    finally:
        shared.end_turn(call, time.perf_counter() - start)
    return None
