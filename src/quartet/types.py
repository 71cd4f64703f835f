"""The data that travels between the parts. Plain dataclasses over NumPy arrays: no torch, no protobuf.

Batches are ragged: one flat array and the lengths, never padding.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quartet.errors import InvalidRequest

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class Role(enum.StrEnum):
    """The five kinds of process behind gRPC."""

    ACTOR = "actor"
    CRITIC = "critic"
    REWARD = "reward"
    REFERENCE = "reference"
    ORCHESTRATOR = "orchestrator"


MODEL_ROLES = (Role.ACTOR, Role.CRITIC, Role.REWARD, Role.REFERENCE)
TRAINED_ROLES = (Role.ACTOR, Role.CRITIC)


class FinishReason(enum.StrEnum):
    """Why a response ended: the model said so (its last token is EOS), or the token limit did."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Derived, never drawn: the same trajectory has the same id however often it is produced."""

    run: str
    step: int
    prompt: int
    sample: int

    def __str__(self) -> str:
        return f"{self.run}/{self.step}/{self.prompt}/{self.sample}"

    @classmethod
    def parse(cls, text: str) -> TrajectoryId:
        """Inverse of ``str``. Raises InvalidRequest."""
        parts = text.rsplit("/", 3)
        if len(parts) != 4 or not parts[0] or not all(part.isdecimal() for part in parts[1:]):
            raise InvalidRequest(f"trajectory id {text!r}: expected RUN/STEP/PROMPT/SAMPLE")
        return cls(parts[0], int(parts[1]), int(parts[2]), int(parts[3]))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the prompts file, tokenised once.

    ``index`` is its place in the data set, ``token_ids`` int32 [tokens], ``text`` what they say where the line says it,
    ``fields`` the line's own fields as one JSON object, for reward functions.
    """

    index: int
    token_ids: IntArray
    text: str = ""
    fields: str = "{}"


@dataclass(frozen=True, slots=True)
class Scores:
    """What a reward source says of a batch.

    ``total`` float32 [sequences], the score; ``parts`` by name the unweighted scores of an ensemble's sources, float32
    [sequences] each, empty where there is one source.
    """

    total: FloatArray
    parts: dict[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is drawn. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off."""

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One trajectory to generate. Its random stream is derived from (seed, step, prompt, sample) alone."""

    id: TrajectoryId
    prompt_ids: IntArray


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished response.

    ``prompt_ids`` int32 [prompt tokens]; ``response_ids`` int32 [response tokens], the EOS included when there is one;
    ``log_probs`` float32 [response tokens], of the sampled tokens under the policy that generated them, in nats, at the
    sampling temperature.
    """

    id: TrajectoryId
    policy_version: int
    prompt_ids: IntArray
    response_ids: IntArray
    log_probs: FloatArray
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Ragged prompt+response sequences.

    ``token_ids`` int32 [all tokens], sequence after sequence, prompt then response; ``prompt_lengths`` and
    ``response_lengths`` int32 [sequences]. Values per response token elsewhere are flat [response tokens] in this order.
    """

    token_ids: IntArray
    prompt_lengths: IntArray
    response_lengths: IntArray

    def __post_init__(self) -> None:
        if self.prompt_lengths.shape != self.response_lengths.shape or self.prompt_lengths.ndim != 1:
            raise InvalidRequest(
                f"prompt_lengths {self.prompt_lengths.shape} and response_lengths {self.response_lengths.shape}: "
                "expected two one-dimensional tensors of the same length"
            )
        if len(self.prompt_lengths) == 0:
            raise InvalidRequest("token batch: expected at least one sequence")
        if self.prompt_lengths.min() < 1 or self.response_lengths.min() < 1:
            raise InvalidRequest("token batch: every prompt and every response needs at least one token")
        total = int(self.prompt_lengths.sum(dtype=np.int64) + self.response_lengths.sum(dtype=np.int64))
        if self.token_ids.shape != (total,):
            raise InvalidRequest(f"token_ids {self.token_ids.shape}: the lengths add up to {total} tokens")

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """The trajectories' tokens, in their order."""
        parts = [part for t in trajectories for part in (t.prompt_ids, t.response_ids)]
        return cls(
            token_ids=np.concatenate(parts) if parts else np.zeros(0, np.int32),
            prompt_lengths=np.array([len(t.prompt_ids) for t in trajectories], np.int32),
            response_lengths=np.array([len(t.response_ids) for t in trajectories], np.int32),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> IntArray:
        """Prompt plus response tokens, int32 [sequences]."""
        return self.prompt_lengths + self.response_lengths

    def sequences(self) -> list[IntArray]:
        """Each sequence's token ids as a view into ``token_ids``."""
        return np.split(self.token_ids, np.cumsum(self.lengths)[:-1])

    def check_vocabulary(self, size: int) -> None:
        """Raises InvalidRequest when a token id lies outside [0, size)."""
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        if low < 0 or high >= size:
            raise InvalidRequest(f"token_ids: found {low if low < 0 else high}, the vocabulary is 0..{size - 1}")


@dataclass(frozen=True, slots=True)
class Experience:
    """All that an update needs of one step; sealed in the buffer, read by actor and critic.

    Per sequence: ``scores`` float32 [sequences]. Per response token, flat: ``log_probs`` (at generation),
    ``reference_log_probs``, ``values`` (at generation), ``advantages``, ``returns`` float32, and ``actor_mask`` (1 where the
    token counts in the policy loss, 0 where not) float32, all [response tokens].
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


@dataclass(frozen=True, slots=True)
class OptimizationSettings:
    """How a service walks through one step's experience. ``seed`` orders the mini-batches.

    ``num_epochs`` 0 takes note of the step and leaves the weights as they are. ``skip_non_finite``: a NaN or infinite loss or
    gradient skips its optimizer step; else it ends the update with an error. ``micro_batch_tokens``: most tokens of a forward
    pass, 0 for as many as the service itself found or was configured for.
    """

    num_epochs: int
    num_mini_batches: int
    learning_rate: float
    max_grad_norm: float
    seed: int
    skip_non_finite: bool = False
    micro_batch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """The PPO policy loss. ``dual_clip`` 0 is off; ``kl_loss`` is added with ``kl_loss_coefficient``.

    ``importance_sampling_cap`` truncates the weight of engine/trainer mismatch, 0 is off; ``target_kl``, nats per token, ends the
    update early, 0 is off. ``policy_loss`` is the name of a built-in loss, or the import path that the actor was started with.
    """

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_coefficient: float = 0.0
    kl_loss: Literal["none", "k2", "k3"] = "none"
    kl_loss_coefficient: float = 0.0
    ratio_level: Literal["token", "sequence"] = "token"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    importance_sampling_cap: float = 0.0
    target_kl: float = 0.0
    policy_loss: str = "clipped"


@dataclass(frozen=True, slots=True)
class ValueLossSettings:
    """The value loss. ``value_clip`` 0 is off."""

    value_clip: float = 0.2


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What an applied update reports; the same again when the message is repeated."""

    step: int
    policy_version: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Alert:
    """What a guard found after ``step``: its name, what was done (warn, pause, stop), the figures it saw, what usually helps."""

    step: int
    guard: str
    action: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"guard {self.guard} ({self.action}) after step {self.step}: {self.evidence}; {self.remedy}"


class SaveKind(enum.StrEnum):
    """What a Save writes: enough to go on training; the model alone in Hugging Face format; or its LoRA adapter alone."""

    CHECKPOINT = "checkpoint"
    MODEL = "model"
    ADAPTER = "adapter"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file that a service wrote: path relative to the run's directory, size in bytes, SHA-256 in hexadecimal."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What one role of a process says of itself.

    ``answers_as_reference``: an actor whose adapter can be off. ``broken``: an update or a restore broke off, and only a restore
    makes the model usable again. ``buffer_unreachable``: the rollout buffer was, when the role last tried. ``work_pending``:
    calls that wait for the compute thread. ``tokens``: response tokens since the start, "generated" and "trained".
    ``micro_batch_tokens``: of an update that does not say otherwise, which uses ``gradient_checkpointing`` or not;
    ``micro_batch_tokens_held``: most that the memory held at the start, when ``free_bytes`` were free and a token needed
    ``token_bytes``; 0 where nobody looked.
    """

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
