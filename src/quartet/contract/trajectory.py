"""Trajectories: prompts, segments, outcomes, scores, and ragged batches of tokens without padding."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.contract.arrays import BoolArray, ExpertArray, FloatArray, IntArray
from quartet.errors import ComputationFailed, InvalidRequest


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

    left_out: the step did not need the trajectory, because others of its prompt used fewer tokens. It is no failure.

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
    LEFT_OUT = "left_out"


FAILURES = tuple(outcome for outcome in Outcome if outcome not in (Outcome.OK, Outcome.LEFT_OUT))
"""Every outcome of a trajectory that failed."""


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
    texts by name, see ``quartet.contract.logged_values``. ``cured_faults``: number of failed attempts that a further one cured,
    by source; "" is a single one. Raises ComputationFailed if scores and outcomes contradict each other.
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
        if Outcome.LEFT_OUT in self.outcomes:
            raise ComputationFailed(
                f"outcomes: {Outcome.LEFT_OUT} is none of a score; expected ok, or the kind of a failure"
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
class Branch:
    """One token sequence of an episode: a prompt, then turns of the policy, with observations between them.

    ``segments``: a prompt, then policy and observation segments; the last one is of the policy unless the episode failed. The
    prompt holds all tokens before the branch's own first turn, so no turn is in two branches. ``parent`` is the index of the
    branch that it was forked from, -1 without one, and ``shared_tokens`` the number of tokens at the beginning of the prompt that
    are those of the parent. The response is all segments after the prompt, one flat array.
    """

    segments: tuple[Segment, ...]
    parent: int = -1
    shared_tokens: int = 0

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
            np.array([part.role is SegmentRole.POLICY for part in response], np.bool_),
            [len(part.token_ids) for part in response],
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
    def log_probs(self) -> FloatArray:
        """Log-probs, 0 at observation tokens: float32 [response tokens]. Every turn needs them."""
        return _joined(
            [
                part.log_probs if part.role is SegmentRole.POLICY else np.zeros(len(part.token_ids), np.float32)
                for part in self.segments[1:]
            ],
            np.float32,
        )

    def with_log_probs(self, log_probs: FloatArray) -> Branch:
        """Return the branch with these log-probs, float32 [response tokens]. Those of observation tokens are dropped."""
        segments, start = [self.segments[0]], 0
        for segment in self.segments[1:]:
            end = start + len(segment.token_ids)
            own = segment.role is SegmentRole.POLICY
            segments.append(replace(segment, log_probs=log_probs[start:end]) if own else segment)
            start = end
        return replace(self, segments=tuple(segments))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: one or more branches, each of them a sequence of tokens. See ``Branch``.

    ``segments`` are those of the first branch, and most episodes have no other. ``further_branches`` follow in the order of
    their last turns, so the last branch ends the episode; the index of a branch, as in ``Branch.parent``, counts the first one
    as 0. Properties of tokens and turns run over all branches in this order. One turn is a prompt and a policy segment.
    ``turn_rewards``: the environment's reward after each turn; empty without an environment. ``outcome`` is not ok if the episode
    failed, with the cause in ``detail``; such a trajectory has no reward. ``weights_digest``: digest of the generating weights,
    16 bytes, or empty if the generator shares the weights of the actor. ``generator`` is its name. ``version_spans`` cover the
    policy's tokens, branch after branch; empty if one policy version generated all of them. ``attempt`` is the number of the
    Generate call. ``logged``: what its agent logged, see ``quartet.contract.logged_values``. ``routed_experts`` uint8 or uint16
    [prompt tokens + response tokens - 1, layers, experts per token]: the experts that the engine chose for each token but the
    last one, in every layer of the model, 0 in layers without experts; None without rollout.router_replay.
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
    further_branches: tuple[Branch, ...] = ()
    logged: Mapping[str, Any] = field(default_factory=dict)
    routed_experts: ExpertArray | None = None

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
    def branches(self) -> tuple[Branch, ...]:
        """All branches, the first one included: at least one."""
        return (Branch(self.segments), *self.further_branches)

    @property
    def branch_ids(self) -> tuple[str, ...]:
        """Id of each branch: that of the trajectory for the first one, then RUN/STEP/PROMPT/SAMPLE#BRANCH, counted from 1."""
        return (str(self.id), *(f"{self.id}#{index + 1}" for index in range(len(self.further_branches))))

    @property
    def prompt_ids(self) -> IntArray:
        """Prompt of the first branch, int32 [prompt tokens]."""
        return self.segments[0].token_ids

    @property
    def response_ids(self) -> IntArray:
        """Tokens after the prompt of each branch, int32 [response tokens]. Those of a single segment are not copied."""
        return _joined([branch.response_ids for branch in self.branches], np.int32)

    @property
    def response_mask(self) -> BoolArray:
        """True at the policy's own tokens: bool [response tokens]."""
        return _joined([branch.response_mask for branch in self.branches], np.bool_)

    @property
    def log_probs(self) -> FloatArray:
        """Log-probs, 0 at observation tokens: float32 [response tokens]; float32 [0] if the engine reports none."""
        if not self.has_log_probs:
            return NO_LOG_PROBS
        return _joined([branch.log_probs for branch in self.branches], np.float32)

    @property
    def turns(self) -> tuple[Segment, ...]:
        """The policy's segments."""
        return tuple(turn for branch in self.branches for turn in branch.turns)

    @property
    def policy_ids(self) -> IntArray:
        """The policy's own tokens, int32 [policy tokens]. Those of a single turn are not copied."""
        return _joined([segment.token_ids for segment in self.turns], np.int32)

    @property
    def has_log_probs(self) -> bool:
        """True if the engine reported the log-probs of all turns."""
        return all(len(segment.log_probs) for segment in self.turns)

    @property
    def consumption(self) -> tuple[int, int, int]:
        """Order by which a step chooses trajectories of a prompt: tokens of the policy, turns, and sample index."""
        return len(self.policy_ids), len(self.turns), self.id.sample

    def with_log_probs(self, log_probs: FloatArray) -> Trajectory:
        """Return the trajectory with these log-probs, float32 [response tokens]. Those of observation tokens are dropped."""
        ends = np.cumsum([len(branch.response_ids) for branch in self.branches])[:-1]
        first, *further = (
            branch.with_log_probs(part) for branch, part in zip(self.branches, np.split(log_probs, ends), strict=True)
        )
        return replace(self, segments=first.segments, further_branches=tuple(further))


def _joined(parts: Sequence[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    """Return the parts as one array."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """Answer of an environment to a reset or to a turn of the policy.

    ``observation`` int32 [tokens], may be empty: the tokens that follow in the trajectory. ``prompt`` int32 [tokens]: those of a
    new branch, which the next turn begins; None if it continues the branch. ``reward`` is that of the turn, 0 for a reset.
    ``done``: the episode is over. ``outcome`` is not ok if the environment failed, with the cause in ``detail``, without text of
    prompts and turns. Such a reply is done and its reward is NaN. ``state``: what the environment needs to continue after this
    reply in another session; empty if it cannot, and at the end. Raises ComputationFailed if they contradict each other.
    """

    observation: IntArray
    reward: float
    done: bool
    outcome: Outcome = Outcome.OK
    detail: str = ""
    state: str = ""
    prompt: IntArray | None = None

    def __post_init__(self) -> None:
        ok = self.outcome is Outcome.OK
        if math.isfinite(self.reward) != ok or math.isinf(self.reward):
            raise ComputationFailed(
                f"reward: {self.reward:g} with outcome {self.outcome}; expected a finite number with outcome ok, and NaN with "
                "any other"
            )
        if self.outcome is Outcome.LEFT_OUT:
            raise ComputationFailed(f"outcome {self.outcome}: is none of an environment")
        if not ok and (len(self.observation) or not self.done):
            raise ComputationFailed(f"outcome {self.outcome}: expected no observation, and done")
        if self.state and self.done:
            raise ComputationFailed("state: expected none at the end of an episode")
        if self.prompt is not None and (self.done or len(self.observation) or not len(self.prompt)):
            raise ComputationFailed("prompt: expected at least one token, without an observation, and not at the end")

    def same_answer(self, other: EnvironmentReply) -> bool:
        """Return whether two replies give an episode the same reward and tokens."""
        return (self.reward, self.done) == (other.reward, other.done) and all(
            (one is None) == (two is None) and np.array_equal(one, two)  # type: ignore[arg-type]
            for one, two in ((self.observation, other.observation), (self.prompt, other.prompt))
        )

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
    ``routed_experts`` uint8 or uint16 [all tokens - sequences, layers, experts per token]: those of ``Trajectory``, one sequence
    after the other; None to let the model choose.
    """

    token_ids: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray
    updates: int = 0
    routed_experts: ExpertArray | None = None

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
        experts, inputs = self.routed_experts, total - len(self.prompt_lengths)
        if experts is not None and (experts.ndim != 3 or len(experts) != inputs):
            raise InvalidRequest(
                f"routed_experts {experts.shape}: expected [{inputs}, layers, experts per token], all tokens but the last one of "
                "each sequence"
            )

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return the tokens of ``trajectories``, in their order: one sequence for each branch."""
        return cls._of_branches(trajectories, [branch for t in trajectories for branch in t.branches])

    @classmethod
    def of_policy(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return the tokens of ``trajectories`` for the policy: with the experts that the engine chose, if it reports them.

        Raises InvalidRequest if only some have experts, or of different shapes.
        """
        batch, experts = cls.of(trajectories), [item.routed_experts for item in trajectories]
        chosen = [each for each in experts if each is not None]
        if not chosen:
            return batch
        shapes = sorted({each.shape[1:] for each in chosen})
        if len(chosen) < len(experts) or len(shapes) > 1:
            raise InvalidRequest(
                f"routed_experts: {len(chosen)} of {len(experts)} trajectories have experts, of the shapes {shapes}; expected "
                "one shape for all of them"
            )
        return replace(batch, routed_experts=np.concatenate(chosen))

    @classmethod
    def of_last_branches(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Return the last branch of each of ``trajectories``, which is what reward sources score: one sequence for each."""
        return cls._of_branches(trajectories, [t.branches[-1] for t in trajectories])

    @classmethod
    def _of_branches(cls, trajectories: Sequence[Trajectory], branches: Sequence[Branch]) -> TokenBatch:
        parts = [(branch.prompt_ids, branch.response_ids) for branch in branches]
        return cls(
            token_ids=np.concatenate([ids for part in parts for ids in part]) if parts else np.zeros(0, np.int32),
            prompt_lengths=np.array([len(prompt) for prompt, _ in parts], np.int32),
            response_lengths=np.array([len(response) for _, response in parts], np.int32),
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
