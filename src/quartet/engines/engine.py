"""The interface of generation engines, and what each kind of engine states about itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quartet.config.rollout import ENGINE_ENTRY_POINTS, ENGINES, check_engine_name
from quartet.contract.arrays import ExpertArray, FloatArray, IntArray
from quartet.contract.generation import EngineProperties as EngineProperties
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import TrajectoryId, VersionSpan
from quartet.errors import ConfigError
from quartet.weight_transfer.tensors import WeightSet

if TYPE_CHECKING:
    from quartet.config.root import Config

Cancelled = Callable[[], bool]
"""Function that returns True once the caller no longer waits."""


TokenDecoder = Callable[[Sequence[int] | IntArray], str]
"""Function that returns the text of token ids, special tokens included."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Description of the policy for an engine. ``model``: path or hub id whose config.json describes the architecture.

    ``stop_ids`` end a response. ``vocabulary_size``: number of token ids that the model embeds. ``max_sequence_tokens``: longest
    prompt and response together; 0 is no limit. ``dtype``: "float32", "bfloat16" or "float16". ``decode``: the tokenizer,
    for stop strings; None in a process without one. ``tokenizer_fingerprint``: "" in a process without one.
    """

    model: str
    dtype: str
    stop_ids: frozenset[int]
    vocabulary_size: int
    max_sequence_tokens: int
    decode: TokenDecoder | None = field(default=None, compare=False)
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy that an actor trains, for an engine that shares its weights.

    ``model`` is a transformers model, updated in place. ``adapter`` is its LoRA adapter if only that is trained.
    """

    model: Any
    tokenizer: Any
    adapter: Any
    served: ServedModel


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """An engine's response to a request.

    ``token_ids`` include the stop token if there is one. ``log_probs`` are in nats, one for each token; None if the engine
    reports none of the whole distribution. An engine with ``properties.in_flight_updates`` names in ``spans`` the weights of each
    part of every response, in order. Others leave them empty: the loaded weights made all tokens. ``stopped``: the engine reports
    that a stop string ended the response. ``routed_experts``: see ``Trajectory``; rows after those are ignored. None without
    rollout.router_replay.
    """

    request: GenerationRequest
    token_ids: Sequence[int] | IntArray
    log_probs: Sequence[float] | FloatArray | None
    spans: tuple[VersionSpan, ...] = ()
    stopped: bool = False
    routed_experts: ExpertArray | None = None


class TurnSource(Protocol):
    """Source of the turns of episodes, which arrive while an engine generates others. Thread-safe."""

    @property
    def open(self) -> bool:
        """True while more requests may come."""

    def take(self, wait: bool) -> Sequence[GenerationRequest]:
        """Return the requests that have arrived. With ``wait`` and without any, wait for one for a fraction of a second."""

    def request_of(self, id: TrajectoryId) -> GenerationRequest:
        """Return the last request of a trajectory. A trajectory has one turn at a time."""


class Engine(Protocol):
    """Generation engine, with its own copy of the weights or with those of an actor's policy.

    Not thread-safe, except that an engine with ``properties.in_flight_updates`` takes ``load_weights`` on another thread while
    ``generate`` runs.
    """

    @property
    def properties(self) -> EngineProperties:
        """Guarantees of this engine with its present settings."""

    def load_weights(self, weights: WeightSet, changed: Collection[str]) -> Mapping[str, bytes]:
        """Load a policy version, and reset every cache that depends on the previous one.

        ``changed`` names the tensors that differ from the version that the engine holds; at the first call, all of them. Return
        the digest of each tensor of ``weights``, see ``digests.tensor_digest``, computed from what the engine holds afterwards.
        Raises ServiceFailed or ConfigError.

        An engine that shares the weights of a policy gets no tensors: it only takes note that the policy is of another version.

        During a generation no token is made by a mixture of both versions. After a failure the generation ends with an error.
        """

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParameters, seed: int, cancelled: Cancelled
    ) -> Iterator[EngineResponse]:
        """Yield each response as soon as it is finished.

        The seed of a request is ``random_streams.engine_seed(seed, id, turn)``. Its token limit is that of
        ``GenerationRequest.own_sampling``. Raises InvalidRequest at the call. While iterating,
        raises Cancelled, ServiceFailed with the engine's error, or EngineFailed if only a restart of this process helps. A failed
        generation is an error, never an empty response.

        Asks ``cancelled`` between two steps. An engine that does not ask for ``timeouts.score_seconds`` counts as stuck. An
        engine that also asks while it waits for other processes raises EngineFailed if they report no progress for that time.
        """

    def sleep(self, everything: bool = True) -> None:
        """Free the memory of the device until the next ``load_weights`` or ``generate``. Do nothing on a separate device.

        ``everything``: also what takes long to allocate again, if the engine can tell.
        """

    def close(self) -> None:
        """Release all resources of the engine."""


@runtime_checkable
class ReadableEngine(Protocol):
    """Generation engine whose weights can be read back at any time between two generations.

    Those of a ``TurnEngine`` can also be read back while the caller of ``generate_turns`` has a response.
    """

    def held_digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return the digest of at least these tensors, computed from what the engine holds now. See ``Engine.load_weights``."""


@runtime_checkable
class CopyingEngine(Protocol):
    """Generation engine that takes the weights of a policy in its process tensor by tensor, so that nothing else holds them."""

    def copy_weights(self, tensors: Iterable[tuple[str, Any]]) -> Mapping[str, bytes]:
        """Copy every weight, a torch tensor. All of ``tensors`` are consumed in any case. See ``Engine.load_weights``."""


@runtime_checkable
class TurnEngine(Protocol):
    """Generation engine that takes requests while it generates, so that its batch stays full between turns."""

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Cancelled,
        turns: TurnSource,
    ) -> Iterator[EngineResponse]:
        """Generate the requests that ``turns`` provides, until it is closed. ``requests``: the prompts of the trajectories.

        See ``Engine.generate`` for the rest.
        """


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a kind of engine can guarantee with default settings in one of the places where it runs.

    ``runs_in`` names its process and environment. ``depends_on`` says which settings change the guarantees. ``tested``: where
    `make engines` has run the contract suite. ``batch_invariant``: where the engine is, in words.
    """

    properties: EngineProperties
    runs_in: str
    tested: str
    depends_on: str = ""
    batch_invariant: str = "no"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of ``COLUMNS``."""
        seeded, _, *rest = described(self.properties)
        return (self.properties.name, seeded, self.batch_invariant, *rest)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A value of rollout.engine. Its module imports the engine's packages when the engine is created.

    ``create`` loads the policy of a config, and returns an engine with its own copy of the weights and what it serves; None for
    an engine that does not run in a generator. ``share`` returns an engine for the weights of a policy in its process, which gets
    the folder of the process's certificates; None for an engine that needs a generator. Both raise ConfigError or ModelError.
    ``package`` must be installed in the engine's environment. ``seed_remedy`` and ``batch_remedy`` say what to set so that the
    engine is seeded and batch-invariant; "" for nothing.
    """

    name: str
    package: str
    guarantees: tuple[Guarantees, ...]
    create: Callable[[Config], tuple[Engine, ServedModel]] | None = None
    share: Callable[[Config, Policy, Path | None], Engine] | None = None
    seed_remedy: str = ""
    batch_remedy: str = ""


COLUMNS = ("engine", "seeded", "batch-invariant", "log-probs", "weights", "digest", "in-flight updates")
"""Columns of the table of guarantees."""


def described(properties: EngineProperties) -> tuple[str, ...]:
    """Return the guarantees in words, in the order of ``COLUMNS`` after the name."""
    seeded, batch_invariant, in_flight = (
        "yes" if value else "no"
        for value in (properties.seeded, properties.batch_invariant, properties.in_flight_updates)
    )
    return (seeded, batch_invariant, properties.log_probs, properties.weights, properties.digest, in_flight)


def find_engine(name: str) -> EngineKind:
    """Return what an engine states about itself. Raises ConfigError if no installed package has it, or if it cannot be used."""
    try:
        check_engine_name(name)
    except ValueError as error:
        raise ConfigError(f"rollout.engine {name}: {error}") from None
    if (module := ENGINES.get(name)) is not None:
        kind: EngineKind = import_module(module).KIND
    else:
        (entry, *_) = entry_points(group=ENGINE_ENTRY_POINTS, name=name)
        try:
            kind = entry.load()
        except Exception as error:
            raise ConfigError(
                f"rollout.engine {name}: the entry point {entry.value} cannot be imported: {type(error).__name__}: {error}; "
                "repair or remove its package"
            ) from error
        if not isinstance(kind, EngineKind):
            raise ConfigError(
                f"rollout.engine {name}: the entry point {entry.value} is {type(kind).__name__}, expected an EngineKind of "
                "quartet.engines.engine; repair its package"
            )
    return kind
