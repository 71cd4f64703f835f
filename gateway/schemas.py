"""What the REST API takes and gives: the contract with the dashboard, the command line and anyone's own scripts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Item = TypeVar("Item")


class Model(BaseModel):
    """What every message is made of: no unknown fields, the docstring of a field is its description."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Request(Model):
    """What every request's body is made of: true is no number, and neither is "0.2"."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False)


class Access(StrEnum):
    """What the bearer of a token may do."""

    VIEWER = "viewer"
    OPERATOR = "operator"


class Session(Model):
    """Whom the gateway takes the caller for."""

    access: Access
    """``viewer`` may read, ``operator`` may command, too."""
    version: str
    """Of Quartet."""
    run: str | None
    """The run that this gateway was started with; null where it shows a folder of runs."""
    may_start_runs: bool
    """Whether ``POST /api/v1/runs`` is open to operators."""


class FieldProblem(Model):
    """What is wrong with one field of a request."""

    field: str
    """Where: ``body.run.steps``, ``query.limit``, ``path.step``, ``header.authorization``."""
    problem: str
    """What, and what was expected."""


class Problem(Model):
    """An error, as RFC 9457 has it; media type application/problem+json."""

    type: str = "about:blank"
    """Always ``about:blank``: the status says what kind of problem it is."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What went wrong, what was expected, what to do."""
    fields: list[FieldProblem] = []
    """The fields that are to blame, where some are."""


class Page(Model, Generic[Item]):
    """A part of a list."""

    items: list[Item]
    """In the order that the method names."""
    total: int | None = None
    """Items of all pages, where that is known without reading them all."""
    next: str | None = None
    """``cursor`` of the next page; null on the last one."""


class State(StrEnum):
    """Where a run stands. ``idle``: it is not finished, and nothing runs it now."""

    STARTING = "starting"
    TRAINING = "training"
    PAUSED = "paused"
    RECOVERING = "recovering"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    IDLE = "idle"


class RunSummary(Model):
    """A run in a list."""

    name: str
    """The folder it lies in."""
    state: State
    live: bool
    """Whether an orchestrator runs it now: only then it takes commands."""
    step: int
    """The last committed step."""
    total_steps: int
    estimator: str
    """gae, reinforce, rloo, grpo, ..."""
    seed: int
    changed: float
    """When it last committed a step or else was started, seconds since 1970."""
    reward_mean: float | None
    """Of the last committed step."""
    kl_mean: float | None
    """Of the last committed step, nats per response."""
    problem: str | None = None
    """Why its files cannot be read, or null. Where they cannot, the other figures are empty."""


class Progress(Model):
    """What a live run is doing."""

    state: State
    step: int
    total_steps: int
    phase: str
    """generate, update, checkpoint, evaluate, paused, waiting for actor, done, ..."""
    scored: int
    """Trajectories of the step in hand that have been scored."""
    wanted: int
    """Trajectories that the step in hand needs."""
    error: str
    """Why it failed, or empty."""
    recoveries: int
    notes: list[str]
    """The newest things that a user should know, oldest first."""


class RunDetail(RunSummary):
    """A run by itself."""

    progress: Progress | None
    """Null unless it is live."""
    kl_target: float | None
    """What an adaptive KL controller steers at, nats per response; null for a fixed coefficient."""
    has_critic: bool
    metric_names: list[str]
    checkpoints: int
    evaluations: int
    alerts: int
    failed_trajectories: int
    """Trajectories that could not be scored, over the whole run."""


class StartRun(Request):
    """A run to start."""

    config: dict[str, Any]
    """The config tree, as in a YAML file. ``run.name`` names it; ``run.directory`` is the gateway's own."""
    resume: bool = False
    """Go on with the run of this name where it broke off."""


class RunConfig(Model):
    """A run's settings."""

    config: dict[str, Any]
    """As resolved, passwords replaced by stars."""
    yaml: str
    """The same, as the file says it."""


class Curve(Model):
    """One metric over the steps. Where steps were many, each point stands for several in a row."""

    steps: list[int]
    """The last step of each point."""
    mean: list[float | None]
    """Mean over the point's steps; null where the metric is missing or no number."""
    low: list[float | None]
    high: list[float | None]


class Metrics(Model):
    """Metrics of one run."""

    run: str
    first: int
    """First step asked for that there is, 0 where there is none."""
    last: int
    bucket: int
    """Most steps that a point stands for."""
    curves: dict[str, Curve]


class StepSummary(Model):
    """One committed step."""

    step: int
    seconds: float | None
    """This and the others: null where the step's line lacks it, or it is no number."""
    generate_seconds: float | None
    score_seconds: float | None
    update_seconds: float | None
    reward_mean: float | None
    kl_mean: float | None
    response_tokens: int | None
    failed_trajectories: int


class Span(Model):
    """Something that a process did during a step. Times are seconds after the step's start."""

    service: str
    """actor, critic, reward, reference, orchestrator, redis."""
    phase: str
    """generate, score, log_probs, values, wait, prepare, seal, update, commit, acknowledge, checkpoint."""
    start: float
    end: float
    count: int = 1
    """Calls that the span stands for: neighbours of one kind are joined where a step has very many."""


class StepDetail(Model):
    """One committed step, whole."""

    step: int
    metrics: dict[str, float | None]
    started: float | None
    """Seconds since 1970; null where no timeline was kept."""
    spans: list[Span]
    """Sorted by service and start; empty where no timeline was kept."""
    has_tokens: bool
    """Whether its trajectories can be looked at token by token."""


class TrajectorySummary(Model):
    """One response."""

    id: str
    """RUN/STEP/PROMPT/SAMPLE."""
    step: int
    prompt_index: int
    sample: int
    policy_version: int
    prompt: str
    response: str
    score: float
    """Raw, of the reward service."""
    parts: dict[str, float]
    """Scores of an ensemble's sources, before their weights; empty where there is one source."""
    kl: float
    """Of the response against the reference, nats."""
    response_tokens: int
    finished: bool
    """Whether the model ended it; otherwise the token limit did."""


class Token(Model):
    """One token. What is null was not kept, or is not known of a prompt's token."""

    id: int
    text: str
    """What it adds to the text."""
    log_prob: float | None = None
    """Under the policy that generated it, nats."""
    reference_log_prob: float | None = None
    kl: float | None = None
    """log_prob - reference_log_prob, nats."""
    value: float | None = None
    advantage: float | None = None
    """As it was trained on."""
    return_: Annotated[float | None, Field(alias="return", serialization_alias="return")] = None
    """What the value was trained towards."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, populate_by_name=True)


class TrajectoryDetail(TrajectorySummary):
    """One response, token by token."""

    kl_coefficient: float | None
    """β of its step."""
    prompt_tokens: list[Token]
    """Empty where tokens were not kept."""
    tokens: list[Token]
    """Of the response."""
    lower: str | None
    """Id of the response of the same step with the next lower score."""
    higher: str | None
    """The next higher one."""


class EvaluationSummary(Model):
    """One evaluation: means over the validation prompts."""

    step: int
    metrics: dict[str, float | None]


class EvaluationRow(Model):
    """One validation prompt of an evaluation, as kept by the run: prompt, responses, scores."""

    values: dict[str, Any]


class CheckpointInfo(Model):
    """One checkpoint."""

    step: int
    name: str | None
    """A named one is kept however many come after it."""
    created: float
    """Seconds since 1970."""
    bytes: int
    problem: str | None
    """Why it cannot be used, or null. What is looked at here are the manifest and the files' sizes."""


class ServiceInfo(Model):
    """One process of a live run."""

    role: str
    address: str
    health: Literal["serving", "not_serving", "unreachable"]
    detail: str
    """What is wrong, or empty."""
    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    parameters: int | None = None
    policy_version: int | None = None
    step: int | None = None
    micro_batch_tokens: int | None = None
    """Most tokens of one forward pass of an update that does not say otherwise, as configured or as its memory allowed."""
    gradient_checkpointing: bool | None = None
    """Whether such an update computes activations again on the way back."""
    busy_seconds: dict[str, float] = {}
    """Seconds of work done since its start, by kind."""
    load: float | None = None
    """Part of the time since the last look in which it worked, 0 to 1; null at the first look."""


class Buffer(Model):
    """What waits in Redis for a live run."""

    reachable: bool
    rollouts: int | None
    """Trajectories in the stream that are not acknowledged yet."""
    experience_steps: list[int]
    """Steps whose sealed experience is kept."""
    memory_bytes: int | None


class AlertInfo(Model):
    """What a guard found."""

    step: int
    guard: str
    action: str
    evidence: str
    remedy: str


class Guards(Model):
    """The guards' settings and what they found."""

    settings: dict[str, Any]
    alerts: list[AlertInfo]
    """Newest first, at most 200."""


class FailedTrajectory(Model):
    """A trajectory that could not be scored."""

    step: int
    id: str | None
    prompt: str | None
    response: str | None
    attempts: int | None
    error: str


class LogInfo(Model):
    """One process's log."""

    name: str
    bytes: int


class LogTail(Model):
    """The end of a log."""

    name: str
    lines: list[str]
    truncated: bool
    """Whether there is more before."""


class SettingInfo(Model):
    """A setting that can be changed while the run goes on."""

    name: Literal["kl_coefficient", "actor.learning_rate", "critic.learning_rate"]
    value: float
    """Of the next step; of a learning rate what its schedule starts from."""
    low: float
    high: float


class Change(Model):
    """A change of a setting."""

    setting: str
    before: float
    after: float
    step: int
    """The first step that it is for."""
    who: str
    at: float
    """Seconds since 1970."""


class Settings(Model):
    """What can be changed while the run goes on, and what was."""

    settings: list[SettingInfo]
    """Empty unless the run is live."""
    changes: list[Change]
    """Oldest first; of more than 200 the newest."""


class ChangeSettings(Request):
    """Settings to change; all of them or, where one is refused, none."""

    kl_coefficient: float | None = None
    actor_learning_rate: Annotated[float | None, Field(alias="actor.learning_rate")] = None
    critic_learning_rate: Annotated[float | None, Field(alias="critic.learning_rate")] = None


class RollBack(Request):
    """Where to go back to."""

    step: Annotated[int, Field(ge=1, le=1_000_000_000)]
    """A step that has a checkpoint."""


class Accepted(Model):
    """A command was taken."""

    detail: str
    """What happens now, and when."""


class AuditEntry(Model):
    """A command that somebody gave, and that got as far as the run."""

    at: float
    """Seconds since 1970."""
    who: str
    """The token's access and the client's address."""
    command: str
    """pause, resume, stop, checkpoint, rollback, set, start."""
    details: dict[str, Any]
    outcome: str
    """``accepted``, or why it was refused."""
