"""Generation engines behind one interface: what the actor asks of them, and what each is given of the policy.

``quartet.models.generation.torch_engine`` is the one in torch; the others here import their libraries when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quartet.models.lora import Adapter
from quartet.types import FloatArray, GenerationRequest, SamplingParameters, TokenBatch, Trajectory

Cancelled = Callable[[], bool]
"""Whether the caller of a generation waits no more."""


class Engine(Protocol):
    """What generates. Not for use by two threads at once."""

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
        """The policy is about to be updated: gives back what memory it can until the next generation."""

    def weights_changed(self) -> None:
        """The policy has other weights now: nothing of the former may be used any more."""

    def close(self) -> None:
        """Ends it."""


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
