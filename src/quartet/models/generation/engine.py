"""Generation engines behind one interface: what the actor asks of them, and what each is given of the policy.

``quartet.models.generation.torch_engine`` is the one in torch; the others here import their libraries when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quartet.models.weights.lora import Adapter
from quartet.types import FloatArray, GenerationRequest, SamplingParameters, TokenBatch, Trajectory

Cancelled = Callable[[], bool]
"""Returns true when the caller no longer waits."""


class Engine(Protocol):
    """Generation engine. Not thread-safe."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Cancelled,
    ) -> Iterator[Trajectory]:
        """The trajectories, each as soon as it is finished.

        The seed of a trajectory is derived from ``seed``, step, prompt and sample. ``log_probs`` are the engine's own where it
        gives them, the trainer's where not. Raises InvalidRequest at the call; while iterating, Cancelled and whatever the engine
        fails with: what it could not generate is never an empty response.
        """

    def release(self) -> None:
        """Free memory for an update of the policy, until the next generation."""

    def weights_changed(self) -> None:
        """Tell the engine that the policy's weights have changed: it must not use the previous ones again."""

    def close(self) -> None:
        """Release everything that the engine holds."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The model that learns, as an engine sees it.

    ``adapter`` is what of it learns, where it has one; ``stop_ids`` end a response. ``score`` gives the model's own log-probs of
    responses at a temperature, float32 [response tokens].
    """

    model: Any
    tokenizer: Any
    adapter: Adapter | None
    stop_ids: frozenset[int]
    score: Callable[[TokenBatch, float], FloatArray]


EngineFactory = Callable[[Policy], Engine]
"""Makes an engine for a policy that was loaded. Raises ConfigError or ModelError."""
