"""The interface of generation engines, and the view of the policy that each engine gets.

``quartet.models.generation.torch_engine`` needs torch only. The other engines import their libraries when they are created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from quartet.contract.arrays import FloatArray
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TokenBatch, Trajectory
from quartet.engines.engine import TurnSource
from quartet.models.weights.lora import Adapter

Cancelled = Callable[[], bool]
"""Function that returns True once the caller no longer waits."""


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
        """Yield each trajectory as soon as it is finished.

        The seed of a trajectory is derived from ``seed``, step, prompt and sample. ``log_probs`` come from the engine if it
        reports them, otherwise from the trainer. Raises InvalidRequest at the call. While iterating, raises Cancelled or the
        error of the engine. A failed generation is an error, never an empty response.
        """

    def release(self, everything: bool = False) -> None:
        """Free memory for an update of the policy, until the next generation.

        ``everything``: also what takes long to allocate again.
        """

    def weights_changed(self) -> None:
        """Notify the engine that the policy's weights changed. It must not use the previous weights again."""

    def close(self) -> None:
        """Release all resources of the engine."""


@runtime_checkable
class TurnEngine(Protocol):
    """Engine that takes requests while it generates, so that its batch stays full between turns."""

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        policy_version: int,
        cancelled: Cancelled,
        turns: TurnSource,
    ) -> Iterator[Trajectory]:
        """Generate the requests that ``turns`` provides, until it is closed. ``requests``: the prompts of the trajectories.

        See ``Engine.generate`` for the rest.
        """


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy model, as engines use it.

    ``adapter`` is the LoRA adapter if only an adapter is trained. ``stop_ids`` end a response. ``score`` returns the model's
    log-probs of responses at a temperature, float32 [response tokens].
    """

    model: Any
    tokenizer: Any
    adapter: Adapter | None
    stop_ids: frozenset[int]
    score: Callable[[TokenBatch, float], FloatArray]


EngineFactory = Callable[[Policy], Engine]
"""Function that creates an engine for a loaded policy. Raises ConfigError or ModelError."""
