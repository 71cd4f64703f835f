"""Roles of processes and their status."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quartet.contract.generation import EngineProperties
from quartet.contract.weights import PublishedWeights, WeightTransfer


class Role(enum.StrEnum):
    """The kinds of process behind gRPC, by name: the name of the service, and what the process does with a model.

    ``holds_model``: it may share a process with others of its kind, or be a group of ranks. ``trained``: it takes updates and is
    saved. ``replicated``: its service may have several addresses.
    """

    ACTOR = "actor", "Actor", "holds_model", "trained"
    CRITIC = "critic", "Critic", "holds_model", "trained"
    REWARD = "reward", "Reward", "holds_model", "replicated"
    REFERENCE = "reference", "Reference", "holds_model", "replicated"
    ORCHESTRATOR = "orchestrator", "Orchestrator"
    GENERATOR = "generator", "Generation"
    ENVIRONMENT = "environment", "Environment"

    service: str
    holds_model: bool
    trained: bool
    replicated: bool

    def __new__(cls, name: str, service: str = "", *properties: str) -> Role:
        role = str.__new__(cls, name)
        role._value_, role.service = name, f"quartet.v1.{service}Service"
        for each in ("holds_model", "trained", "replicated"):
            setattr(role, each, each in properties)
        return role


MODEL_ROLES = tuple(role for role in Role if role.holds_model)
TRAINED_ROLES = tuple(role for role in Role if role.trained)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Status of one role of a process. See ``RoleStatus`` in proto/quartet/v1/status.proto for every field."""

    role: Role
    model: str = ""
    device: str = ""
    dtype: str = ""
    parameters: int = 0
    policy_version: int = 0
    tokenizer_fingerprint: str = ""
    vocabulary_size: int = 0
    run: str = ""
    step: int = 0
    threads: int = 0
    busy_seconds: dict[str, float] = field(default_factory=dict)
    max_sequence_tokens: int = 0
    answers_as_reference: bool = False
    broken: bool = False
    leader_epoch: int = 0
    buffer_unreachable: bool = False
    work_pending: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    micro_batch_tokens: int = 0
    micro_batch_tokens_held: int = 0
    gradient_checkpointing: bool = False
    token_bytes: int = 0
    free_bytes: int = 0
    engine: EngineProperties | None = None
    published_weights: dict[int, bytes] = field(default_factory=dict)
    last_transfer: WeightTransfer | None = None
    last_publication: PublishedWeights | None = None
    open_sessions: int = 0
    machine: str = ""
    model_files: dict[str, str] = field(default_factory=dict)
    peak_flops: float = 0.0


class GeneratorState(enum.StrEnum):
    """State of a generator in a separate process, as the orchestrator sees it.

    ready: gets work. lost: does not respond. refused: gets no work until it is restarted.
    """

    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class GeneratorInfo:
    """One generator of a run.

    ``address`` is HOST:PORT. ``reason`` says why it is refused. ``trajectories`` were assigned to it and are not finished.
    """

    address: str
    state: GeneratorState
    reason: str = ""
    trajectories: int = 0


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """How busy a device is. See ``DeviceReading`` in proto/quartet/v1/status.proto. None: the device does not report it."""

    name: str
    busy: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """Status of all roles of a process.

    ``metrics_address`` is HOST:PORT of its Prometheus metrics, empty if they are not served. ``instance_id`` is a random id that
    changes when the process is restarted. ``devices`` are empty if the process takes no readings.
    """

    roles: tuple[ServiceStatus, ...]
    version: str
    metrics_address: str = ""
    instance_id: str = ""
    devices: tuple[DeviceReading, ...] = ()
