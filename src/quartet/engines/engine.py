"""The interface of generation engines, and the properties that each engine declares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from quartet.types import GenerationRequest, SamplingParameters
from quartet.weight_transfer.tensors import WeightSet

Cancelled = Callable[[], bool]
"""Function that returns True once the caller no longer waits."""


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """Guarantees of an engine. The orchestrator relies on them, so an engine declares only what it keeps.

    ``seeded``: the seed of a trajectory decides its random numbers. ``batch_invariant``: the other requests in a batch change no
    bit of a response. ``log_probs``: of the sampled tokens, at the sampling temperature, over the "whole" distribution or over
    the one that top_k and top_p "truncated"; "none" if the engine reports none or others. ``weights``: way of a new policy
    version into the engine. ``digest``: "read back" if the engine computes it from the weights that it holds after loading,
    "reported" if a server names a version, "none" otherwise. ``in_flight_updates``: takes new weights in the middle of a
    response.
    """

    name: str
    seeded: bool
    batch_invariant: bool
    log_probs: Literal["whole", "truncated", "none"]
    weights: Literal["shared", "tensors", "folder", "adapter", "restart", "static"]
    digest: Literal["read back", "reported", "none"]
    in_flight_updates: bool = False


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Description of the policy for an engine. ``model``: path or hub id whose config.json describes the architecture.

    ``stop_ids`` end a response. ``vocabulary_size``: number of token ids that the model embeds. ``max_sequence_tokens``: longest
    prompt and response together; 0 is no limit. ``dtype``: "float32", "bfloat16" or "float16".
    """

    model: str
    dtype: str
    stop_ids: frozenset[int]
    vocabulary_size: int
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """An engine's response to a request.

    ``token_ids`` include the stop token if there is one. ``log_probs`` are in nats, one for each token; None if the engine
    reports none of the whole distribution.
    """

    request: GenerationRequest
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None


class Engine(Protocol):
    """Generation engine with its own copy of the weights. Not thread-safe."""

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine with its present settings."""

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Load a policy version, and reset every cache that depends on the previous one.

        ``changed`` names the tensors that differ from the version that the engine holds; at the first call, all of them. Return
        the digest of each tensor of ``weights``, see ``digests.tensor_digest``, computed from what the engine holds afterwards.
        Raises ServiceFailed or ConfigError.
        """

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Cancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished.

        The seed of a trajectory is ``random_streams.engine_seed(seed, id)``. Raises InvalidRequest at the call. While iterating,
        raises Cancelled, or ServiceFailed with the engine's error. A failed generation is an error, never an empty response.
        """

    def sleep(self) -> None:
        """Free the memory of the device until the next ``load_weights`` or ``generate``. Do nothing on a separate device."""

    def close(self) -> None:
        """Release all resources of the engine."""
