"""Generation in the actor's process with separate weights, so that it can use an older policy during updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quartet.errors import FailedPrecondition
from quartet.services.generator.generator import Generator, Progress
from quartet.types import GenerationBatch
from quartet.weight_transfer.messages import Message, WeightsRequest
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.source import WeightSource

PULL_SECONDS = 600.0
"""Time limit of a copy between two places in memory."""


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """The weight source of this process, without RPC."""

    source: WeightSource
    address: str = "this process"

    def get_weights(self, request: WeightsRequest, timeout: float) -> Iterator[Message]:
        """Yield the messages of a stream."""
        return self.source.stream(request)


class LocalGenerator:
    """A generator that brings the requested policy version into its engine by itself."""

    def __init__(self, generator: Generator, source: WeightSource) -> None:
        self._generator, self._source = generator, source
        self._mirror = WeightMirror("the engine of this process")

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate with the requested policy version. See ``Generator.generate``."""
        if not batch.weights_digest:
            raise FailedPrecondition("generate: the request names no digest of the weights")

        self._generator.load(
            batch.run,
            batch.leader_epoch,
            batch.policy_version,
            batch.weights_digest,
            lambda: self._mirror.pull(
                [LocalPeer(self._source)], self._source.run, batch.policy_version, batch.weights_digest, PULL_SECONDS
            ),
        )
        return self._generator.generate(batch, cancelled, on_start, on_progress)
