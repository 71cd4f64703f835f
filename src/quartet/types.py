"""Data types that the parts of Quartet exchange: dataclasses over NumPy arrays, without torch and protobuf.

Batches are ragged: one flat array and the lengths, without padding.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quartet.errors import ComputationFailed, InvalidRequest

LossAggregation = Literal[
    "token_mean", "sequence_mean", "token_sum", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
"""Reduction of the token losses of a mini-batch. See ``quartet.ppo.losses.loss_weights``."""
RatioLevel = Literal["token", "sequence"]
"""Unit of the probability ratio of the clipped policy loss: a token, or a response."""
IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


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


class FinishReason(enum.StrEnum):
    """Reason for the end of a response.

    eos: an end-of-sequence token, or the token that completes a stop string. length: the limit of tokens or turns. done: its
    environment ended the episode. failed: see the trajectory's ``outcome``.
    """

    EOS = "eos"
    LENGTH = "length"
    DONE = "done"
    FAILED = "failed"


class SegmentRole(enum.StrEnum):
    """Origin of a segment's tokens: the prompt, the policy, or the environment."""

    PROMPT = "prompt"
    POLICY = "policy"
    OBSERVATION = "observation"


class Outcome(enum.StrEnum):
    """Outcome of the generation or scoring of a response. Only ``OK`` has a score: a failure is never a number.

    timeout: no result in time. scorer_error: the reward source failed, or returned no finite number. sandbox_error: the sandbox
    of a verifier failed. environment_error: the environment failed. cancelled: the work was cancelled. refused: the source
    declined to score the response.
    """

    OK = "ok"
    TIMEOUT = "timeout"
    SCORER_ERROR = "scorer_error"
    SANDBOX_ERROR = "sandbox_error"
    ENVIRONMENT_ERROR = "environment_error"
    CANCELLED = "cancelled"
    REFUSED = "refused"


FAILURES = tuple(outcome for outcome in Outcome if outcome is not Outcome.OK)
"""Every outcome without a score."""


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Id of a trajectory. It is derived, not random: a trajectory that is generated again has the same id."""

    run: str
    step: int
    prompt: int
    sample: int

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.prompt}/{self.sample}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        """Parse the result of ``str``. Raises InvalidRequest."""
        parts = text.rsplit("/", 3)
        if len(parts) != 4 or not parts[0] or not all(part.isdecimal() for part in parts[1:]):
            raise InvalidRequest(f"trajectory id {text!r}: expected RUN/STEP/PROMPT/SAMPLE")
        return cls(parts[0], int(parts[1]), int(parts[2]), int(parts[3]))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the data set, tokenised.

    ``index`` is its position in the data set and ``token_ids`` int32 [tokens]. ``text`` is the prompt's text, if the prompts file
    has one. ``fields`` are all fields of the line as one JSON object, for reward functions. ``prompt_set`` is the name of its
    set, empty without sets.
    """

    index: int
    token_ids: IntArray
    text: str = ""
    fields: str = "{}"
    prompt_set: str = ""


@dataclass(frozen=True, slots=True)
class PromptSetContent:
    """SHA-256 of the rows of a set of prompts, and their commit if they are from a data set on the hub."""

    sha256: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a batch.

    ``total`` float32 [sequences], in units of reward; NaN exactly where the outcome is not ok. ``parts`` float32 [sequences]
    each: the unweighted scores of an ensemble's sources, by name; NaN where a source has none. Empty for a single source.
    ``outcomes`` [sequences], or empty if all are ok. ``details`` [sequences], or empty: the cause of each failure, without text
    of prompts and responses. ``logged`` [sequences], or empty: what the source logged for each sequence, numbers, booleans and
    texts by name, see ``quartet.logged_values``. ``cured_faults``: number of failed attempts that a further one cured, by source;
    "" is a single one. Raises ComputationFailed if scores and outcomes contradict each other.
    """

    total: FloatArray
    parts: dict[str, FloatArray] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    details: tuple[str, ...] = ()
    logged: tuple[Mapping[str, Any], ...] = ()
    cured_faults: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.total)
        for name, values in (("outcomes", self.outcomes), ("details", self.details), ("logged", self.logged)):
            if values and len(values) != count:
                raise ComputationFailed(
                    f"{name}: expected none, or one for each of the {count} scores, got {len(values)}"
                )
        for index in np.flatnonzero(
            np.isfinite(self.total) != [outcome is Outcome.OK for outcome in self.all_outcomes]
        ):
            raise ComputationFailed(
                f"scores: index {index} is {self.total[index]:g} with outcome {self.all_outcomes[index]}; expected a finite "
                "number with outcome ok, and NaN with any other"
            )
        if np.isinf(self.total).any() or any(np.isinf(values).any() for values in self.parts.values()):
            raise ComputationFailed("scores: contain infinity, expected finite numbers, or NaN for a failure")

    @property
    def all_outcomes(self) -> tuple[Outcome, ...]:
        """Outcome of each sequence, [sequences]."""
        return self.outcomes or (Outcome.OK,) * len(self.total)

    @property
    def all_details(self) -> tuple[str, ...]:
        """Detail of each sequence, [sequences]; "" without one."""
        return self.details or ("",) * len(self.total)

    @property
    def all_logged(self) -> tuple[Mapping[str, Any], ...]:
        """Logged values of each sequence, [sequences]; an empty mapping without any."""
        return self.logged or ({},) * len(self.total)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling of response tokens. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``stop_strings``: a response ends after the token that completes one of them in its text.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """Return whether top_k, top_p or min_p removes tokens from the distribution. Greedy sampling ignores them."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One trajectory, or one turn of it, to generate. Its random stream depends on (seed, step, prompt, sample, turn) only.

    ``prompt_ids``: all tokens before the turn. ``turn`` counts from 0. ``max_tokens`` limits the turn; 0 leaves the limit to the
    sampling parameters. ``greedy``: take the likeliest token at each position, with its log-prob at temperature 1.
    """

    id: TrajectoryId
    prompt_ids: IntArray
    turn: int = 0
    max_tokens: int = 0
    greedy: bool = False

    def own_sampling(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return ``sampling`` with the token limit of this request, at temperature 0 if it is greedy."""
        limit = self.max_tokens or sampling.max_response_tokens
        if limit == sampling.max_response_tokens and not self.greedy:
            return sampling
        if self.greedy:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return replace(sampling, max_response_tokens=limit)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of episodes with an environment.

    ``max_turns`` limits the turns of a trajectory. ``max_turn_tokens`` limits the tokens of one turn; 0 leaves the limit to the
    sampling parameters, which limits all tokens after the prompt, observations included. ``fields`` are the prompts' own fields,
    JSON objects by prompt index, for the environment.
    """

    max_turns: int
    max_turn_tokens: int = 0
    fields: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationBatch:
    """Arguments of one Generate call.

    ``requests``: the trajectories, all of ``run`` and ``step``. ``policy_version`` is the number of updates that the policy must
    have taken. ``weights_digest``: the digest that the generator's weights must have, 16 bytes; empty for a generator that shares
    the weights of the actor. ``generator``: name that its trajectories carry, HOST:PORT; empty for the actor. ``attempt``: number
    of this call, which its trajectories carry, too. ``episode``: settings of episodes with the environment; None generates one
    response to each prompt.
    """

    run: str
    step: int
    leader_epoch: int
    requests: Sequence[GenerationRequest]
    sampling: SamplingParameters
    seed: int
    policy_version: int
    weights_digest: bytes = b""
    generator: str = ""
    attempt: int = 0
    episode: EpisodeSettings | None = None


def requests_of(
    run: str, step: int, prompts: Sequence[Prompt], samples: int, first_sample: int = 0, greedy: int = 0
) -> list[GenerationRequest]:
    """Return one request per trajectory: prompt after prompt, each with its samples from ``first_sample`` on.

    After them, each prompt has ``greedy`` greedy ones.
    """
    end = first_sample + samples
    return [
        GenerationRequest(TrajectoryId(run, step, prompt.index, sample), prompt.token_ids, greedy=sample >= end)
        for prompt in prompts
        for sample in range(first_sample, end + greedy)
    ]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Part of a trajectory that one policy version generated: its number of ``tokens``, and the digest of the weights."""

    policy_version: int
    weights_digest: bytes
    tokens: int


NO_LOG_PROBS: FloatArray = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one origin.

    ``token_ids`` int32 [n]. ``log_probs`` float32 [n] of a policy segment: log-probs of the sampled tokens under the generating
    policy at the sampling temperature, in nats; float32 [0] if the engine reports none, and for other roles. ``policy_version``
    is that of the last token of a policy segment, and 0 for other roles.
    """

    role: SegmentRole
    token_ids: IntArray
    log_probs: FloatArray = field(default_factory=lambda: NO_LOG_PROBS)
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: the prompt, then turns of the policy, with observations of an environment between them.

    ``segments``: the prompt, then policy and observation segments; the last one is of the policy unless the episode failed. A
    policy segment includes its EOS if there is one. The response is all segments after the prompt, one flat array. One turn is a
    prompt and a policy segment. ``turn_rewards``: the environment's reward after each turn; empty without an environment.
    ``outcome`` is not ok if the episode failed, with the cause in ``detail``; such a trajectory has no reward.
    ``weights_digest``: digest of the generating weights, 16 bytes, or empty if the generator shares the weights of the actor.
    ``generator`` is its name. ``version_spans`` cover the policy's tokens; empty if one policy version generated all of them.
    ``attempt`` is the number of the Generate call.
    """

    id: TrajectoryId
    policy_version: int
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    weights_digest: bytes = b""
    generator: str = ""
    version_spans: tuple[VersionSpan, ...] = ()
    attempt: int = 0
    turn_rewards: tuple[float, ...] = ()
    outcome: Outcome = Outcome.OK
    detail: str = ""

    @classmethod
    def of_response(
        cls,
        id: TrajectoryId,
        policy_version: int,
        prompt_ids: IntArray,
        response_ids: IntArray,
        log_probs: FloatArray,
        finish_reason: FinishReason,
        weights_digest: bytes = b"",
        generator: str = "",
        version_spans: tuple[VersionSpan, ...] = (),
        attempt: int = 0,
    ) -> Trajectory:
        """Return a trajectory of one turn. ``log_probs`` float32 [response tokens], or [0] if the engine reports none."""
        segments = (
            Segment(SegmentRole.PROMPT, prompt_ids),
            Segment(SegmentRole.POLICY, response_ids, log_probs, policy_version),
        )
        return cls(id, policy_version, segments, finish_reason, weights_digest, generator, version_spans, attempt)

    @property
    def prompt_ids(self) -> IntArray:
        """Int32 [prompt tokens]."""
        return self.segments[0].token_ids

    @property
    def response_ids(self) -> IntArray:
        """Tokens after the prompt, int32 [response tokens]. Those of a single segment are not copied."""
        return _joined([segment.token_ids for segment in self.segments[1:]], np.int32)

    @property
    def response_mask(self) -> BoolArray:
        """True at the policy's own tokens: bool [response tokens]."""
        response = self.segments[1:]
        return np.repeat(
            [part.role is SegmentRole.POLICY for part in response], [len(part.token_ids) for part in response]
        )

    @property
    def log_probs(self) -> FloatArray:
        """Log-probs, 0 at observation tokens: float32 [response tokens]; float32 [0] if the engine reports none."""
        if len(self.segments) == 2:
            return self.segments[1].log_probs
        if not self.has_log_probs:
            return NO_LOG_PROBS
        return _joined(
            [
                part.log_probs if part.role is SegmentRole.POLICY else np.zeros(len(part.token_ids), np.float32)
                for part in self.segments[1:]
            ],
            np.float32,
        )

    @property
    def turns(self) -> tuple[Segment, ...]:
        """The policy's segments."""
        return tuple(segment for segment in self.segments if segment.role is SegmentRole.POLICY)

    @property
    def policy_ids(self) -> IntArray:
        """The policy's own tokens, int32 [policy tokens]. Those of a single turn are not copied."""
        return _joined([segment.token_ids for segment in self.turns], np.int32)

    @property
    def has_log_probs(self) -> bool:
        """True if the engine reported the log-probs of all turns."""
        return all(len(segment.log_probs) for segment in self.turns)

    def with_log_probs(self, log_probs: FloatArray) -> Trajectory:
        """Return the trajectory with these log-probs, float32 [response tokens]. Those of observation tokens are dropped."""
        segments, start = [self.segments[0]], 0
        for segment in self.segments[1:]:
            end = start + len(segment.token_ids)
            own = segment.role is SegmentRole.POLICY
            segments.append(replace(segment, log_probs=log_probs[start:end]) if own else segment)
            start = end
        return replace(self, segments=tuple(segments))


def _joined(parts: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    """Return the parts as one array."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """Answer of an environment to a reset or to a turn of the policy.

    ``observation`` int32 [tokens], may be empty: the tokens that follow in the trajectory. ``reward`` is that of the turn, 0 for
    a reset. ``done``: the episode is over. ``outcome`` is not ok if the environment failed, with the cause in ``detail``, without
    text of prompts and turns. Such a reply is done and its reward is NaN. Raises ComputationFailed if the two contradict.
    """

    observation: IntArray
    reward: float
    done: bool
    outcome: Outcome = Outcome.OK
    detail: str = ""

    def __post_init__(self) -> None:
        ok = self.outcome is Outcome.OK
        if math.isfinite(self.reward) != ok or math.isinf(self.reward):
            raise ComputationFailed(
                f"reward: {self.reward:g} with outcome {self.outcome}; expected a finite number with outcome ok, and NaN with "
                "any other"
            )
        if not ok and (len(self.observation) or not self.done):
            raise ComputationFailed(f"outcome {self.outcome}: expected no observation, and done")

    @classmethod
    def failed(cls, outcome: Outcome, detail: str) -> EnvironmentReply:
        """Return the reply of an environment that failed."""
        return cls(np.zeros(0, np.int32), math.nan, True, outcome, detail)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Ragged sequences of prompt and response.

    ``token_ids`` int32 [all tokens]: for each sequence its prompt, then its response. ``prompt_lengths`` and
    ``response_lengths`` int32 [sequences]. Arrays with one value per response token are flat, [response tokens], in this order.
    ``updates``: the updates that the policy had taken before the step, or the evaluation, of the sequences.
    """

    token_ids: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray
    updates: int = 0

    def __post_init__(self) -> None:
        if self.prompt_lengths.shape != self.response_lengths.shape or self.prompt_lengths.ndim != 1:
            raise InvalidRequest(
                f"prompt_lengths {self.prompt_lengths.shape} and response_lengths {self.response_lengths.shape}: "
                "expected two one-dimensional arrays of the same length"
            )
        if len(self.prompt_lengths) == 0:
            raise InvalidRequest("token batch: expected at least one sequence")
        if self.prompt_lengths.min() < 1 or self.response_lengths.min() < 1:
            raise InvalidRequest("token batch: every prompt and every response needs at least one token")
        total = int(self.prompt_lengths.sum(dtype=np.int64) + self.response_lengths.sum(dtype=np.int64))
        if self.token_ids.shape != (total,):
            raise InvalidRequest(f"token_ids {self.token_ids.shape}: expected {total} tokens, the sum of the lengths")

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return the tokens of ``trajectories``, in their order."""
        parts = [part for t in trajectories for part in (t.prompt_ids, t.response_ids)]
        return cls(
            token_ids=np.concatenate(parts) if parts else np.zeros(0, np.int32),
            prompt_lengths=np.array([len(t.prompt_ids) for t in trajectories], np.int32),
            response_lengths=np.array([len(t.response_ids) for t in trajectories], np.int32),
            # An evaluation has no step. Off-policy, an older policy has generated.
            updates=max((max(t.policy_version, t.id.step - 1) for t in trajectories), default=0),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> IntArray:
        """Prompt plus response tokens, int32 [sequences]."""
        return self.prompt_lengths + self.response_lengths

    def sequences(self) -> list[IntArray]:
        """Return the token ids of each sequence, as views into ``token_ids``."""
        return np.split(self.token_ids, np.cumsum(self.lengths)[:-1])

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequest if a token id is outside [0, size)."""
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        if low < 0 or high >= size:
            raise InvalidRequest(f"token_ids: expected ids in 0..{size - 1}, got {low if low < 0 else high}")


@dataclass(frozen=True, slots=True)
class Experience:
    """Data of one step's update. The orchestrator writes it to the buffer; actor and critic read it.

    ``scores`` float32 [sequences], or [0] in a run without scores. The other arrays are float32 [response tokens], flat:
    ``log_probs`` and ``values`` at generation, ``reference_log_probs``, ``advantages``, ``returns``, and ``actor_mask``, which is
    1 for a token in the policy loss and 0 for a masked one. ``response_mask``, bool [response tokens], is True at the policy's
    own tokens; bool [0] if all tokens are. At the other tokens, those of observations, all arrays are 0, and no loss or metric
    counts them.
    """

    run: str
    step: int
    policy_version: int
    ids: tuple[str, ...]
    batch: TokenBatch
    scores: FloatArray
    log_probs: FloatArray
    reference_log_probs: FloatArray
    values: FloatArray
    advantages: FloatArray
    returns: FloatArray
    actor_mask: FloatArray
    response_mask: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))

    @property
    def policy_tokens(self) -> int:
        """Number of the policy's own tokens."""
        return int(np.count_nonzero(self.response_mask)) if len(self.response_mask) else len(self.advantages)


@dataclass(frozen=True, slots=True)
class OptimizationSettings:
    """Optimization of one step. ``seed`` orders the mini-batches.

    ``num_epochs`` 0 records the step and leaves the weights unchanged. With ``skip_non_finite``, a NaN or infinite loss or
    gradient skips its optimizer step; otherwise it fails the update. ``micro_batch_tokens`` is the maximum number of tokens of a
    forward pass; 0 uses the service's own setting.
    """

    num_epochs: int
    num_mini_batches: int
    learning_rate: float
    max_grad_norm: float
    seed: int
    skip_non_finite: bool = False
    micro_batch_tokens: int = 0


CorrectionLevel = Literal["none", "token", "sequence", "geometric_mean"]
CorrectionTreatment = Literal["truncate", "mask", "seq_mask"]
RejectionStatistic = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Bounds on a statistic of the difference between trainer and engine. ``lower`` is for k1 only; 0 means 1/``upper``."""

    statistic: RejectionStatistic
    upper: float
    lower: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Correction for the difference between the policy that sampled and the trainer's old policy.

    See ``RolloutCorrection`` in proto/quartet/v1/update.proto for the formulas. A bound of 0 is off. ``off_policy_mask`` is in
    nats per token; 0 is off.
    """

    level: CorrectionLevel = "none"
    treatment: CorrectionTreatment = "truncate"
    lower: float = 0.0
    upper: float = 0.0
    normalize: bool = False
    rejection: tuple[RejectionRule, ...] = ()
    off_policy_mask: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """Policy loss. See ``PolicyLossSettings`` in proto/quartet/v1/update.proto for the formulas.

    ``dual_clip`` 0 is off. ``kl_loss`` is added with weight ``kl_loss_coefficient``. ``ratio_level`` "sequence" is the product of
    the token ratios of a response. ``target_kl``, in nats per token, ends the update early; 0 is off. ``policy_loss`` is the name
    of a built-in loss, or the import path that the actor was started with, and ``parameters`` are that loss's own.
    ``loss_divisor`` is the constant of aggregation "sequence_mean_token_sum_norm"; the others do not read it.
    ``rollout_correction`` corrects for the difference between generation engine and trainer. ``old_log_probs``: computed by the
    trainer, or those of the engine.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_coefficient: float = 0.0
    kl_loss: Literal["none", "k2", "k3"] = "none"
    kl_loss_coefficient: float = 0.0
    ratio_level: RatioLevel = "token"
    aggregation: LossAggregation = "token_mean"
    target_kl: float = 0.0
    policy_loss: str = "clipped"
    parameters: Mapping[str, float] = field(default_factory=dict)
    loss_divisor: float = 0.0
    rollout_correction: RolloutCorrection = RolloutCorrection()
    old_log_probs: Literal["trainer", "rollout"] = "trainer"


@dataclass(frozen=True, slots=True)
class ValueLossSettings:
    """Clipped value loss. ``value_clip`` 0 is off."""

    value_clip: float = 0.2


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """Arguments of one Update call. The loss is the one of the role: policy loss for the actor, value loss for the critic."""

    run: str
    step: int
    leader_epoch: int
    optimization: OptimizationSettings
    loss: PolicyLossSettings | ValueLossSettings


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of an applied update. A repeated request gets the same result."""

    step: int
    policy_version: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Alert:
    """Finding of a guard after ``step``.

    ``action`` is warn, pause or stop; ``evidence`` names the metrics that the guard compared; ``remedy`` is advice that usually
    helps.
    """

    step: int
    guard: str
    action: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"guard {self.guard} ({self.action}) after step {self.step}: {self.evidence}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class ReferenceVersion:
    """A version of a synchronized reference: step of its newest policy, folder below the run's directory, and digest."""

    step: int
    directory: str
    digest: bytes


class SaveKind(enum.StrEnum):
    """Content of a save.

    A checkpoint is enough to continue training. A model is in Hugging Face format. An adapter is only the LoRA adapter.
    The EMA is a model with the moving average of the weights.
    """

    CHECKPOINT = "checkpoint"
    MODEL = "model"
    ADAPTER = "adapter"
    EMA = "ema"


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Arguments of one Save call. ``step`` is the step that the model must have; None accepts any step.

    ``directory`` is relative to the run's directory and confined to it.
    """

    run: str
    directory: str
    kind: SaveKind
    leader_epoch: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Arguments of one Restore call. ``step`` 0 is the initial model, with an empty ``directory``."""

    run: str
    step: int
    directory: str
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One saved file: path relative to the run's directory, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """Guarantees of a generation engine. The orchestrator relies on them, so an engine declares only what it keeps.

    ``seeded``: the seed of a trajectory decides its random numbers. ``batch_invariant``: the other requests in a batch change no
    bit of a response. ``log_probs``: of the sampled tokens, at the sampling temperature, over the "whole" distribution or over
    the one that top_k, top_p and min_p "truncated"; "none" if the engine reports none or others. ``weights``: way of a new policy
    version into the engine. ``digest``: "read back" if the engine computes it from the weights that it holds after loading,
    "reported" if a server names a version, "none" otherwise. ``in_flight_updates``: takes new weights in the middle of a
    response. ``trial``: result of the trial of batch invariance at the engine's start, and the processor, or the reason for no
    trial; empty for an engine that is not tried. ``trial_digest`` is of the trial's logits, in hexadecimal: engines with the same
    model and equal digests round in the same way.
    """

    name: str
    seeded: bool
    batch_invariant: bool
    log_probs: Literal["whole", "truncated", "none"]
    weights: Literal["shared", "tensors", "folder", "adapter", "restart", "static"]
    digest: Literal["read back", "reported", "none"]
    in_flight_updates: bool = False
    trial: str = ""
    trial_digest: str = ""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Transfer of one policy version into a generator.

    ``weights_digest`` has 16 bytes. ``source``: role and HOST:PORT; empty if nothing was transferred. ``bytes`` were received,
    compressed. ``delta``: only differences to the previous version were sent. ``load_seconds`` include reading the weights back
    from the engine.
    """

    policy_version: int
    weights_digest: bytes
    source: str = ""
    bytes: int = 0
    delta: bool = False
    transfer_seconds: float = 0.0
    load_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightPublication:
    """Publication of one policy version by a weight source.

    ``weights_digest`` has 16 bytes. ``changed_tensors`` differ from the version before. ``delta_bytes``: encoded size of the
    difference to it; 0 without one. ``seconds`` include the copy of the weights.
    """

    policy_version: int
    weights_digest: bytes
    changed_tensors: int
    total_bytes: int
    delta_bytes: int
    seconds: float


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


class RunState(enum.StrEnum):
    """State of a run."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    PAUSED = "paused"
    RECOVERING = "recovering"

    @property
    def ended(self) -> bool:
        """Return whether the state is final."""
        return self in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED)


@dataclass(slots=True)
class Progress:
    """Progress of a run. See ``Progress`` in proto/quartet/v1/orchestrator.proto for every field.

    ``metrics`` are the metrics of the last committed step. ``notes_before`` and ``alerts_before`` count the entries that were
    dropped before the first of ``notes`` and ``alerts``.
    """

    run: str
    total_steps: int
    state: RunState = RunState.STARTING
    step: int = 0
    phase: str = "starting"
    num_scored: int = 0
    num_expected: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    exit_code: int = 0
    notes: list[str] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    recoveries: int = 0
    notes_before: int = 0
    alerts_before: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that can change during a run: its value for the next step, its minimum ``low`` and its maximum ``high``."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Change of a setting from ``step`` on. ``user`` requested it; ``at`` is in seconds since 1970."""

    setting: str
    before: float
    after: float
    step: int
    user: str
    at: float
