"""Publication of the policy versions: to the weight source for generators, or to the engine of this process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from quartet.contract.generation import GenerationBatch
from quartet.contract.status import ServiceStatus
from quartet.contract.weights import WeightPublication
from quartet.errors import GroupWeightsChanged, WeightsChanged
from quartet.models.generation.detached_torch import DetachedTorchEngine
from quartet.models.weights.host_tensors import host_tensor
from quartet.services.generator.generator import Generator, Progress
from quartet.weight_transfer.digests import combined_digest
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.tensors import AdapterSettings

Tensors = Iterable[tuple[str, Any]]
"""Name and complete torch tensor of every weight, made one after the other. All of them must be consumed."""


class Publication(Protocol):
    """Receiver of the policy versions of one process of the actor."""

    def publish(self, version: int, tensors: Tensors, adapter: AdapterSettings | None, run: str) -> None:
        """Take over a policy version. ``run``: name of the run, empty before the first update."""

    def published(self) -> Mapping[int, bytes]:
        """Return the digest of every version that can be generated with."""

    def last(self) -> WeightPublication | None:
        """Return the last publication."""

    def reset(self) -> None:
        """Forget all versions: their numbers may stand for other weights now."""


class SourcePublication:
    """Publication to a weight source, from which generators take the versions."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.published, self.reset = source.published, source.reset

    def publish(self, version: int, tensors: Tensors, adapter: AdapterSettings | None, run: str) -> None:
        """See ``Publication.publish``."""
        self._source.publish(version, ((name, host_tensor(value)) for name, value in tensors), adapter, run)

    def last(self) -> WeightPublication | None:
        """See ``Publication.last``."""
        return self._source.last


class NoPublication:
    """Publication of a rank whose policy versions nothing in its process needs. It only takes part in gathering them."""

    def publish(self, version: int, tensors: Tensors, adapter: AdapterSettings | None, run: str) -> None:
        """See ``Publication.publish``."""
        deque(tensors, maxlen=0)

    def published(self) -> Mapping[int, bytes]:
        """Return none."""
        return {}

    def last(self) -> None:
        """Return None."""

    def reset(self) -> None:
        """Do nothing."""


class EnginePublication:
    """An engine of the actor's process that takes over every version, and generates with the newest one.

    The version is copied tensor by tensor into the model of the engine, so nothing else holds it.
    """

    def __init__(self, engine: DetachedTorchEngine, generator: Generator) -> None:
        """``generator`` generates with ``engine``."""
        self._engine, self._generator = engine, generator
        # Generation and publication exclude each other. Both end without the other.
        self._lock = threading.Lock()
        self._last: WeightPublication | None = None

    def publish(self, version: int, tensors: Tensors, adapter: AdapterSettings | None, run: str) -> None:
        """See ``Publication.publish``. Waits for the end of a generation."""
        start, size = time.perf_counter(), 0

        def counted() -> Tensors:
            nonlocal size
            for name, value in tensors:
                size += value.nbytes
                yield name, value

        with self._lock:
            self._last = None
            self._generator.drop()
            digests = self._engine.copy_weights(counted())
            digest = combined_digest(digests)
            self._generator.take_over(version, digests)
            self._last = WeightPublication(version, digest, len(digests), size, 0, time.perf_counter() - start)

    def published(self) -> Mapping[int, bytes]:
        """See ``Publication.published``."""
        last = self._last
        return {} if last is None else {last.policy_version: last.weights_digest}

    def last(self) -> WeightPublication | None:
        """See ``Publication.last``."""
        return self._last

    def reset(self) -> None:
        """See ``Publication.reset``."""
        self._last = None

    def generate(
        self,
        batch: GenerationBatch,
        cancelled: Callable[[], bool],
        on_start: Callable[[], None] = lambda: None,
        on_progress: Progress = lambda trajectories, response_tokens: None,
    ) -> tuple[int, int]:
        """Generate with the newest version. See ``Generator.generate``.

        Raises GroupWeightsChanged if the weights have changed: nothing but a restart of this process publishes a version again.
        """
        with self._lock:
            try:
                return self._generator.generate(batch, cancelled, on_start, on_progress)
            except WeightsChanged as error:
                raise GroupWeightsChanged(str(error)) from error

    def status(self) -> ServiceStatus:
        """Return the status of the generator."""
        return self._generator.status()
