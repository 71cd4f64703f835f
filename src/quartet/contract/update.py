"""Experience, and the settings and results of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from quartet.contract.arrays import BoolArray, FloatArray
from quartet.contract.trajectory import TokenBatch
from quartet.contract.weights import PublishedWeights

LossAggregation = Literal[
    "token_mean", "sequence_mean", "token_sum", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]
"""Reduction of the token losses of a mini-batch. See ``quartet.ppo.losses.loss_weights``."""
RatioLevel = Literal["token", "sequence"]
"""Unit of the probability ratio of the clipped policy loss: a token, or a response."""


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
    """Result of an applied update. A repeated request gets the same result.

    ``publication``: that of the new policy version for generators; None for a critic, and without a weight source.
    """

    step: int
    policy_version: int
    metrics: dict[str, float]
    publication: PublishedWeights | None = None
