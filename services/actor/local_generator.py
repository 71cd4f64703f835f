"""Generation in the actor's process with separate weights, so that it can use an older policy during updates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from quartet.contract.generation import GenerationBatch
from quartet.contract.status import ServiceStatus
from quartet.errors import FailedPrecondition
from quartet.services.generator.generator import Generator, Progress
from quartet.weight_transfer.receiver import PulledWeights
from quartet.weight_transfer.source import WeightSource


class LocalGenerator:
    """A generator that brings the requested policy version into its engine by itself, from the source of its process."""

    def __init__(self, generator: Generator, source: WeightSource) -> None:
        self._generator, self._source = generator, source
        # Those of the last load: of all weights, and of each.
        self._digest = b""
        self._digests: Mapping[str, bytes] = {}

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate with the requested policy version. See ``Generator.generate``."""
        digest = batch.weights_digest
        if not digest:
            raise FailedPrecondition("generate: the request names no digest of the weights")
        start = time.perf_counter()
        with self._source.hold(batch.policy_version, digest) as (weights, digests):
            changed = frozenset(name for name in digests if digests[name] != self._digests.get(name))
            held = PulledWeights(weights, self._digest, changed, 0, time.perf_counter() - start, "this process", "held")
            self._generator.load(batch.run, batch.leader_epoch, batch.policy_version, digest, lambda: held)
            self._digest, self._digests = digest, digests
        return self._generator.generate(batch, cancelled, on_start, on_progress)

    def status(self) -> ServiceStatus:
        """Return the status of the generator."""
        return self._generator.status()
