"""Roles of processes and their status."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quartet.contract.generation import EngineProperties
from quartet.contract.weights import WeightPublication, WeightTransfer


class Role(enum.StrEnum):
    """The kinds of process behind gRPC."""

    ACTOR = "actor"
    CRITIC = "critic"
    REWARD = "reward"
    REFERENCE = "reference"
    ORCHESTRATOR = "orchestrator"
    GENERATOR = "generator"
    ENVIRONMENT = "environment"


MODEL_ROLES = (Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE)
TRAINED_ROLES = (Role.ACTOR, Role.CRITIC)


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
    micro_batch_tokens: int = 0
    micro_batch_tokens_held: int = 0
    gradient_checkpointing: bool = False
    token_bytes: int = 0
    free_bytes: int = 0
    engine: EngineProperties | None = None
    published_weights: dict[int, bytes] = field(default_factory=dict)
    last_transfer: WeightTransfer | None = None
    last_publication: WeightPublication | None = None
    open_sessions: int = 0
    model_files: dict[str, str] = field(default_factory=dict)


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
class ProcessStatus:
    """Status of all roles of a process.

    ``metrics_address`` is HOST:PORT of its Prometheus metrics, empty if they are not served. ``instance_id`` is a random id that
    changes when the process is restarted.
    """

    roles: tuple[ServiceStatus, ...]
    version: str
    metrics_address: str = ""
    instance_id: str = ""
