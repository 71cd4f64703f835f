"""Requests and responses of the REST API, which the dashboard, the command line and users' scripts rely on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Body
from pydantic import BaseModel, ConfigDict, Field

from quartet.config.live_settings import LIVE_NAME_PATTERN
from quartet.contract.control import Alert, Setting, SettingChange
from quartet.contract.generation import EngineProperties
from quartet.contract.profile import MAX_PROFILED_STEPS
from quartet.contract.status import DeviceReading
from quartet.contract.weights import TransferWay
from quartet.services.orchestrator.telemetry.step_profiler import Span

Item = TypeVar("Item")


class Model(BaseModel):
    """Base of all schemas. Unknown fields are refused. The docstring of a field is its description in the OpenAPI document."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class RequestBody(Model):
    """Base of all request bodies. Types are strict: neither ``true`` nor ``"0.2"`` is a number."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False)


class Access(StrEnum):
    """Access level of a token."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class Session(Model):
    """Permissions of the caller's token on this gateway."""

    access: Access
    """``viewer`` can read; ``operator`` can also send commands."""
    version: str
    """Version of Quartet."""
    run: str | None
    """The run that this gateway was started with; null if it serves a folder of runs."""
    may_start_runs: bool
    """True if the caller can start runs with ``POST /api/v1/runs``."""


class FieldProblem(Model):
    """One invalid field of a request."""

    field: str
    """Location, such as ``body.run.steps``, ``query.limit``, ``path.step`` or ``header.authorization``."""
    problem: str
    """The error and the expected value."""


class Problem(Model):
    """An error in the format of RFC 9457, with media type application/problem+json."""

    type: str = "about:blank"
    """Always ``about:blank``: the status identifies the kind of problem."""
    title: str
    """Name of the HTTP status."""
    status: int
    """HTTP status code."""
    detail: str
    """The error, the expected value, and what to do."""
    fields: list[FieldProblem] = []
    """Invalid fields, if any."""


class Page(Model, Generic[Item]):
    """One page of a list."""

    # With docstrings, Pydantic would search the source again for each type of items, in all modules that are loaded.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=False)

    items: list[Item] = Field(description="Items in the documented order of the list.")
    total: int | None = Field(
        default=None, description="Number of items on all pages, if it is known without reading all of them."
    )
    next: str | None = Field(default=None, description="``cursor`` of the next page; null on the last page.")


class State(StrEnum):
    """State of a run. ``idle`` means that it is not finished and has no orchestrator."""

    STARTING = "starting"
    TRAINING = "training"
    PAUSED = "paused"
    RECOVERING = "recovering"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    IDLE = "idle"


class RunSummary(Model):
    """A run in the list of runs."""

    name: str
    """Name of the run, which is also the name of its folder."""
    state: State
    live: bool
    """True if the run is active, which means that its orchestrator accepts commands."""
    step: int
    """Number of the last committed step."""
    total_steps: int
    estimator: str
    """Advantage estimator, such as gae, reinforce, rloo or grpo; for a stage before RLHF: sft or reward-model."""
    seed: int
    changed: float
    """Time of the last committed step, or of the start if there is none, in seconds since 1970."""
    reward_mean: float | None
    """Mean reward of the last committed step."""
    kl_mean: float | None
    """Mean KL to the reference of the last committed step, in nats per response."""
    problem: str | None = None
    """Reason that the run's files cannot be read, or null. If set, the other fields are empty."""


class ProgressInfo(Model):
    """Progress of a run."""

    state: State
    step: int
    total_steps: int
    phase: str
    """Current phase, such as generate, update, checkpoint, evaluate, paused, waiting for actor or done."""
    num_scored: int
    """Scored trajectories of the current step."""
    num_expected: int
    """Trajectories that the current step needs."""
    error: str
    """Reason for the failure of the run, or empty."""
    recoveries: int
    notes: list[str]
    """The newest notes for the user, oldest first."""


class RunDetail(RunSummary):
    """All information about one run."""

    progress: ProgressInfo | None
    """Null unless the run is active."""
    kl_target: float | None
    """Target of the adaptive KL controller, in nats per response; null with a fixed coefficient."""
    has_critic: bool
    has_scores: bool
    """False with reward.source none and no environment."""
    has_teacher: bool
    """True with algorithm.distillation."""
    has_stage: bool
    """True for a stage before RLHF: quartet sft or quartet reward-model."""
    reward_parts: list[str]
    """Names of the parts of an ensemble of rewards; empty for a single source."""
    metric_names: list[str]
    checkpoints: int
    evaluations: int
    alerts: int
    failed_trajectories: int
    """Number of trajectories that could not be scored."""


class StartRunRequest(RequestBody):
    """A request to start a run."""

    config: dict[str, Any]
    """The config as in a YAML file. ``run.name`` is required; ``run.directory`` is set by the gateway."""
    resume: bool = False
    """Continue the existing run of this name from its last checkpoint."""


class RunConfig(Model):
    """The config of a run."""

    config: dict[str, Any]
    """The resolved config, with passwords replaced by asterisks."""
    yaml: str
    """The same config as YAML."""


class StepSummary(Model):
    """One committed step."""

    step: int
    seconds: float | None
    """Duration of the step. This and the following metrics are null if they are missing or not numbers."""
    generate_seconds: float | None
    score_seconds: float | None
    update_seconds: float | None
    reward_mean: float | None
    kl_mean: float | None
    response_tokens: int | None
    failed_trajectories: int


class DeviceSamples(Model):
    """Samples of the devices of one service in a step."""

    service: str
    """As in the spans."""
    samples: list[tuple[float, float | None, float | None, float | None]]
    """Seconds since the start of the step, use from 0 to 1, bytes of memory, watts. A value that is not reported is null."""


class StepDetail(Model):
    """All information about one committed step."""

    step: int
    metrics: dict[str, float | None]
    started: float | None
    """Start time in seconds since 1970; null if there is no timeline."""
    spans: list[Span]
    """Sorted by service and start; empty if there is no timeline."""
    devices: list[DeviceSamples] = []
    """How busy the devices of actor, critic and generators were, about once a second."""
    has_tokens: bool
    """True if the tokens of the step's trajectories were kept."""


class VersionSpan(Model):
    """Part of a response that one policy version generated."""

    policy_version: int
    weights_digest: str
    """Digest of the weights, in hexadecimal."""
    tokens: int


class Segment(Model):
    """Consecutive tokens of a response with an environment: a turn of the policy, or an observation."""

    role: Literal["policy", "observation"]
    text: str
    tokens: int
    reward: float | None = None
    """Reward of the environment after the turn; null for an observation."""


class TrajectorySummary(Model):
    """One response to a prompt."""

    id: str
    """RUN/STEP/PROMPT/SAMPLE."""
    step: int
    prompt_index: int
    sample: int
    policy_version: int
    prompt: str
    response: str
    score: float | None
    """Raw score: of the reward service, plus the rewards of the environment. Null in a run without scores."""
    parts: dict[str, float]
    """Unweighted score of each part of a reward ensemble, and "environment"; empty with a single reward source."""
    kl: float
    """KL of the response to the reference, in nats."""
    response_tokens: int
    """Tokens that the policy generated."""
    finished: bool
    """True if the model or the environment ended the response; false if it was cut off at the limit of tokens or turns."""


class Token(Model):
    """One token. A field is null if it was not kept, or if the token belongs to the prompt or to an observation."""

    id: int
    text: str
    """Text that the token adds."""
    observation: bool = False
    """True if the environment gave the token. It is not trained on."""
    log_prob: float | None = None
    """Log-prob under the policy that generated the token, in nats."""
    reference_log_prob: float | None = None
    kl: float | None = None
    """log_prob - reference_log_prob, in nats."""
    value: float | None = None
    advantage: float | None = None
    """Advantage used in the update."""
    return_: Annotated[float | None, Field(alias="return", serialization_alias="return")] = None
    """Training target of the value."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, populate_by_name=True)


class Branch(Model):
    """A further token sequence of an episode, whose prompt holds all tokens before its first own turn."""

    parent: int
    """Index of the branch that it was forked from: 0 is the first one, 1 the first of `further_branches`. -1 without one."""
    shared_tokens: int
    """Tokens at the beginning of the prompt that are those of the parent."""
    prompt: str
    """Text of the prompt after the shared tokens."""
    prompt_length: int
    """Tokens of the prompt, shared ones included."""
    segments: list[Segment]
    prompt_tokens: list[Token]
    """Tokens of the prompt; empty if they were not kept."""
    tokens: list[Token]
    """Tokens of the response; empty if they were not kept."""


class TrajectoryDetail(TrajectorySummary):
    """One response, token by token. With several branches, its tokens and segments are those of the first one."""

    generator: str
    """Address of the generator, HOST:PORT; empty if the actor generated the response."""
    weights_digest: str
    """Digest of the weights, in hexadecimal; empty if the generator shares the weights of the actor."""
    version_spans: list[VersionSpan]
    """Parts of the response by policy version, in order; empty if `policy_version` generated all of it."""
    kl_coefficient: float | None
    """KL coefficient β of the step."""
    prompt_tokens: list[Token]
    """Tokens of the prompt; empty if they were not kept."""
    tokens: list[Token]
    """Tokens of the response; empty if they were not kept."""
    segments: list[Segment]
    """The policy's turns and the observations of the environment; empty without an environment."""
    further_branches: list[Branch]
    """The other token sequences of the episode, in the order of their beginnings; mostly empty."""
    lower: str | None
    """Id of the response with the next lower score in the same step, or null."""
    higher: str | None
    """Id of the response with the next higher score in the same step, or null."""


class EvaluationSummary(Model):
    """One evaluation: mean metrics over the validation prompts and over each evaluation set."""

    step: int
    policy_version: int | None
    """Number of updates of the policy that responded; null in runs of earlier versions of Quartet."""
    sets: list[str]
    """Names of the evaluation sets whose responses are stored."""
    metrics: dict[str, float | None]


class EvaluationRow(Model):
    """One prompt of an evaluation with its responses and scores, as stored by the run."""

    values: dict[str, Any]


class CheckpointInfo(Model):
    """One checkpoint."""

    step: int
    tags: list[str]
    """Tags of the checkpoint. A tagged checkpoint is never deleted automatically."""
    created: float
    """Time in seconds since 1970."""
    bytes: int
    problem: str | None
    """Reason that the checkpoint cannot be used, or null. Only the manifest and file sizes are checked."""


class WeightTransferInfo(Model):
    """Transfer of one policy version into a generator."""

    policy_version: int
    digest: str
    """Digest of the weights, in hexadecimal."""
    source: str
    """Role and HOST:PORT of the process that sent them; empty if the generator held them already."""
    bytes: int
    """Compressed bytes that were received; 0 by shared memory and by CUDA IPC."""
    way: TransferWay
    """How they came. delta: only differences to the version before were sent. held: the generator had them already."""
    transfer_seconds: float
    """Seconds to receive and verify the weights."""
    load_seconds: float
    """Seconds to load them into the engine and read them back."""


class WeightPublicationInfo(Model):
    """Publication of one policy version by the actor."""

    policy_version: int
    digest: str
    """Digest of the weights, in hexadecimal."""
    changed_tensors: int
    """Tensors that differ from the version before."""
    total_bytes: int
    seconds: float


class ServiceInfo(Model):
    """One process of an active run. A run may have several generators, each with its own address."""

    role: str
    address: str
    health: Literal["serving", "not_serving", "unreachable"]
    detail: str
    """Description of the problem, or empty."""
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    policy_version: int | None = None
    step: int | None = None
    micro_batch_tokens: int | None = None
    """Default maximum number of tokens per forward pass in an update, as configured or as limited by memory."""
    gradient_checkpointing: bool | None = None
    """True if updates recompute activations in the backward pass."""
    busy_seconds: dict[str, float] = {}
    """Busy time since the process started, in seconds by kind of work."""
    load: float | None = None
    """Fraction of the time since the last poll that the process was busy, 0 to 1; null at the first poll."""
    work_pending: int | None = None
    """Calls that wait for the process, including the one that it works on."""
    open_sessions: int | None = None
    """Open sessions of an environment."""
    trajectories: int | None = None
    """Trajectories that the orchestrator has assigned to a generator and that are not finished."""
    tokens_generated: int | None = None
    """Response tokens generated since the process started."""
    tokens_per_second: float | None = None
    """Mean of tokens_generated per second of generation."""
    devices: list[DeviceReading] = []
    """Last readings of the process's GPUs, or of the CPU. A value that a device does not report is null."""
    engine: EngineProperties | None = None
    last_transfer: WeightTransferInfo | None = None
    """Last transfer of weights into a generator."""
    published_versions: list[int] = []
    """Policy versions that generators can take from the actor."""
    last_publication: WeightPublicationInfo | None = None
    """Last policy version that the actor has published."""


class Buffer(Model):
    """Contents of the rollout buffer (Redis) of an active run."""

    reachable: bool
    rollouts: int | None
    """Trajectories in the stream that are not yet acknowledged."""
    experience_steps: list[int]
    """Steps whose experience batches are stored."""
    memory_bytes: int | None


class Guards(Model):
    """The settings of the guards and their alerts."""

    settings: dict[str, Any]
    alerts: list[Alert]
    """Newest first, at most 200."""


class FailedTrajectory(Model):
    """A trajectory or evaluation response that could not be scored."""

    step: int
    id: str | None
    prompt: str | None
    response: str | None
    attempts: int | None
    outcome: str | None
    """timeout, scorer_error, sandbox_error, environment_error, cancelled or refused; null for an evaluation."""
    prompt_skipped: bool | None
    """True if the step has left out the prompt, because no response to it could be scored; null for an evaluation."""
    error: str


class LogInfo(Model):
    """The log of one process."""

    name: str
    bytes: int


class LogTail(Model):
    """The last lines of a log."""

    name: str
    lines: list[str]
    truncated: bool
    """True if the log has earlier lines."""


SettingValues = Annotated[
    dict[
        Annotated[str, Field(pattern=LIVE_NAME_PATTERN)],
        Annotated[float, Field(strict=True, allow_inf_nan=False)],
    ],
    Body(
        description="New values of settings by name. If one value is refused, none is changed. reward.parts.NAME.weight is the "
        "weight of a part of an ensemble. Set both weights in one request to switch the source."
    ),
]


class Settings(Model):
    """The settings that can be changed during training, and past changes."""

    settings: list[Setting]
    """Empty unless the run is active."""
    changes: list[SettingChange]
    """The newest 200 changes, oldest first."""


class RollbackRequest(RequestBody):
    """The checkpoint to restore."""

    step: Annotated[int, Field(ge=1, le=1_000_000_000)]
    """A step that has a checkpoint."""


class ProfileRequest(RequestBody):
    """The steps to profile."""

    steps: Annotated[int, Field(ge=1, le=MAX_PROFILED_STEPS)] = 2
    """Number of steps, from the next one on."""


class CommandAccepted(Model):
    """A command that the run accepted."""

    detail: str
    """Effect of the command, and when it happens."""


class AuditEntry(Model):
    """A command that reached the run."""

    at: float
    """Time in seconds since 1970."""
    user: str
    """Access of the token and network address of the client."""
    command: str
    """pause, resume, stop, checkpoint, rollback, set or start."""
    details: dict[str, Any]
    outcome: str
    """``accepted``, or the reason for the refusal."""
