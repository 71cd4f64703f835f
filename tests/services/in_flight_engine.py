"""An engine that takes new weights between two tokens, when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from quartet.contract.generation import EngineProperties, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import VersionSpan
from quartet.engines.engine import Cancelled as IsCancelled
from quartet.engines.engine import EngineResponse
from quartet.errors import Cancelled, ServiceFailed
from quartet.weight_transfer.tensors import HostTensor, WeightSet, tensor_digest
from tests.waiting import LIMIT

SECONDS = LIMIT
VOCABULARY = 10
"""The engine's tokens are below."""


class InFlightEngine:
    """Engine that decodes all requests together. It waits before token ``pause_at`` of each response, until ``resume``.

    The token at a position follows from the digest of the weights. Updates lose the tensors in ``lost``, or raise ``failure``.
    """

    def __init__(self, pause_at: int = 2) -> None:
        self.properties = EngineProperties(
            "torch", True, False, "whole", "tensors", "read back", in_flight_updates=True
        )
        self.lost: set[str] = set()
        self.failure: Exception | None = None
        self.loads: list[tuple[int, bool]] = []
        """The version of each update, and whether it was in flight."""
        self.paused = threading.Event()
        self.may_load = threading.Event()
        """Cleared by a test, it delays the next update."""
        self.may_load.set()
        self._pause_at, self._resumed = pause_at, threading.Event()
        self._lock = threading.Lock()
        self._generating = False
        self._broken = ""
        self._tensors: dict[str, HostTensor] = {}
        self._held = (0, b"")

    def resume(self) -> None:
        """Continue after the pause. Later generations do not pause."""
        self._resumed.set()

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        assert self.may_load.wait(SECONDS)
        with self._lock:
            self.loads.append((weights.version, self._generating))
            if self.failure is not None:
                self._broken = str(self.failure)
                raise self.failure
            new = {name: weights.tensors[name] for name in changed if name not in self.lost}
            self._tensors |= {name: replace(tensor, data=tensor.data.copy()) for name, tensor in new.items()}
            self._held, self._broken = (weights.version, weights.digest), ""
            return {name: tensor_digest(tensor) for name, tensor in self._tensors.items()}

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: IsCancelled
    ) -> Iterator[EngineResponse]:
        made: list[tuple[int, bytes]] = []
        self._generating = True
        try:
            for position in range(sampling.max_response_tokens):
                if position == self._pause_at:
                    self.paused.set()
                    while not self._resumed.wait(0.01):
                        if cancelled():
                            raise Cancelled("generate: cancelled")
                with self._lock:
                    if self._broken:
                        raise ServiceFailed(f"an update failed: {self._broken}")
                    made.append(self._held)
        finally:
            self._generating = False
        spans = tuple(VersionSpan(*held, made.count(held)) for held in dict.fromkeys(made))
        for request in requests:
            tokens = [token(digest, position) for position, (_, digest) in enumerate(made)]
            yield EngineResponse(request, tokens, [-1.0 - version for version, _ in made], spans)

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


def token(digest: bytes, position: int) -> int:
    """Return the token that weights of a digest generate at a position."""
    return digest[position % len(digest)] % VOCABULARY
