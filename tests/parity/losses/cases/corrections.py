"""Corrections for the policy that sampled: weights, rejected tokens, off-policy sequence masking, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.contract.update import RejectionRule, RolloutCorrection
from quartet.ppo.rollout_correction import (
    geometric_mean_weights,
    importance_metrics,
    importance_weights,
    mean_weight,
    off_policy_tokens,
    rejected_tokens,
)
from tests.parity.losses.batch import Batch
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.cases.policy_losses import OFF
from tests.parity.losses.cases.policy_losses import ours as policy_loss
from tests.parity.losses.peers import openrlhf, trl, verl

METRICS = {
    "importance_weight": "rollout_is_mean",
    "importance_ess": "rollout_is_eff_sample_size",
    "importance_masked_fraction": "rollout_is_oob_ratio",
}
"""Metrics and their names in verl."""


def _weights(correction: RolloutCorrection, batch: Batch) -> Tensor:
    """Return the weights [tokens] as an update computes them: normalized over the batch, and 0 at rejected tokens."""
    weights = importance_weights(*_pair(batch), correction).weights
    if correction.normalize:
        weights = weights / mean_weight(weights, batch.mask, batch.lengths, correction.level)
    return weights * ~rejected_tokens(*_pair(batch), correction.rejection)


def _pair(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probs of both sides, the mask and the lengths."""
    return batch.old_log_probs, batch.rollout_log_probs, batch.mask, batch.lengths


def _correction(
    metrics: tuple[str, ...] = (), rules: dict[str, Any] | None = None, **settings: Any
) -> Callable[[Batch], Results]:
    correction = RolloutCorrection(**settings)
    listed = [RejectionRule(statistic, *bounds) for statistic, bounds in (rules or {}).items()]
    correction = replace(correction, rejection=tuple(listed))

    def run(batch: Batch) -> Results:
        importance = importance_weights(
            batch.old_log_probs, batch.rollout_log_probs, batch.mask, batch.lengths, correction
        )
        values = importance_metrics(importance, batch.mask, batch.lengths, correction)
        return {"weights": _weights(correction, batch), **{METRICS[name]: values[name] for name in metrics}}

    return run


def _off_policy(threshold: float) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        dropped = off_policy_tokens(
            batch.log_probs, batch.rollout_log_probs, batch.advantages, batch.mask, batch.lengths, threshold
        )
        return {"weights": batch.mask * ~dropped}

    return run


def _loss(
    correction: RolloutCorrection,
    aggregation: str = "token_mean",
    token_level: bool = True,
    name: str = "clipped",
    low: float = 0.2,
    high: float = 0.2,
) -> Callable[[Batch], Results]:
    """Return a policy loss as an update computes it: without rejected tokens, and with the importance weights."""

    def run(batch: Batch) -> Results:
        mask = batch.mask * ~rejected_tokens(*_pair(batch), correction.rejection)
        weights = importance_weights(*_pair(batch), correction).weights
        if BUILT_IN_POLICY_LOSSES[name].uses_geometric_mean:
            weights = geometric_mean_weights(weights, mask, batch.lengths)
        function = policy_loss(name, aggregation, token_level, factor=lambda _: weights, clip_low=low, clip_high=high)
        return function(replace(batch, mask=mask))

    return run


def _weighted(
    name: str, theirs: str, aggregation: tuple[str, str], token_level: bool = True, **settings: float
) -> list[Case]:
    """Return cases of a policy loss with weights of tokens: truncated; masked; and with rejected tokens.

    ``aggregation``: Quartet's name and verl's. ``settings`` are the clip range. verl's clip_ratio_c is the ratio cap of DPPO, and
    the dual clip of the others, which is off here.
    """
    truncated = RolloutCorrection("token", "truncate", 0.0, 1.5)
    rejecting = replace(truncated, rejection=(RejectionRule("token_k2", 0.3),))
    clip = {f"clip_ratio_{side}": value for side, value in settings.items()}
    cap = BUILT_IN_POLICY_LOSSES[name].parameters.get("ratio_cap")
    clip["clip_ratio_c"] = cap.default if cap else OFF
    return [
        Case(
            f"{name}, token, {text}",
            verl.NAME,
            theirs,
            _loss(correction, aggregation[0], token_level, name, **settings),
            verl.policy_loss(
                theirs, aggregation[1], token_level, rollout_correction={"rollout_is": "token", **bounds}, **clip
            ),
            f"{given}; {aggregation[0]}",
        )
        for text, given, correction, bounds in (
            ("truncate", "upper 1.5", truncated, {"rollout_is_threshold": 1.5}),
            ("mask", "bounds 0.8, 1.3", MASKED, {"rollout_is_threshold": "0.8_1.3"}),
            (
                "truncate and rejection",
                "upper 1.5; token_k2 0.3",
                rejecting,
                {"rollout_is_threshold": 1.5, "rollout_rs": "token_k2", "rollout_rs_threshold": 0.3},
            ),
        )
    ]


def _keep_near(batch: Batch) -> Tensor:
    return batch.mask * ~off_policy_tokens(
        batch.log_probs, batch.rollout_log_probs, batch.advantages, batch.mask, batch.lengths, 0.1
    )


def _rejection(statistic: str, upper: float, lower: float = 0.0) -> Case:
    threshold: str | float = f"{lower}_{upper}" if lower else upper
    return Case(
        f"rejection {statistic}",
        verl.NAME,
        f"rollout_rs={statistic}",
        _correction(rules={statistic: (upper, lower)}, level="none"),
        verl.correction(weighted=False, rollout_rs=statistic, rollout_rs_threshold=threshold),
        f"bounds {threshold}".replace("_", ", "),
    )


def _trl_mode(mode: str, **settings: Any) -> Case:
    """Return a case of TRL's vllm_importance_sampling_mode."""
    low, high = settings.get("lower", 0.0), settings["upper"]
    bounds = {"vllm_importance_sampling_clip_min": low or None, "vllm_importance_sampling_clip_max": high}
    return Case(
        f"{settings['level']}, {settings['treatment']}",
        trl.NAME,
        f"vllm_importance_sampling_mode={mode}",
        _correction(**settings),
        trl.importance_ratio(vllm_importance_sampling_mode=mode, **bounds),
        f"bounds {low or 'none'}, {high}",
    )


MASKED = RolloutCorrection("token", "mask", 0.8, 1.3)
TOKEN_MEAN, SEQUENCE_MEAN = ("token_mean", "token-mean"), ("sequence_mean", "seq-mean-token-mean")
GROUP = Group(
    "Corrections for the policy that sampled",
    "corrections",
    unique(
        (
            Case(
                "token, truncate",
                verl.NAME,
                "rollout_is=token",
                _correction(("importance_weight", "importance_ess"), level="token", treatment="truncate", upper=1.5),
                verl.correction(
                    ("rollout_is_mean", "rollout_is_eff_sample_size"), rollout_is="token", rollout_is_threshold=1.5
                ),
                "upper 1.5; with mean weight and effective sample size",
            ),
            Case(
                "token, truncate, normalized",
                verl.NAME,
                "rollout_is_batch_normalize",
                _correction(level="token", treatment="truncate", upper=1.5, normalize=True),
                verl.correction(rollout_is="token", rollout_is_threshold=1.5, rollout_is_batch_normalize=True),
                "upper 1.5",
            ),
            Case(
                "sequence, truncate, normalized",
                verl.NAME,
                "rollout_is=sequence",
                _correction(level="sequence", treatment="truncate", upper=2.0, normalize=True),
                verl.correction(rollout_is="sequence", rollout_is_threshold=2.0, rollout_is_batch_normalize=True),
                "upper 2",
            ),
            Case(
                "token, mask (IcePop)",
                verl.NAME,
                "rollout_is=token",
                _correction(("importance_masked_fraction",), level="token", treatment="mask", lower=0.8, upper=1.3),
                verl.correction(("rollout_is_oob_ratio",), rollout_is="token", rollout_is_threshold="0.8_1.3"),
                "bounds 0.8, 1.3; with the masked fraction",
            ),
            Case(
                "sequence, mask",
                verl.NAME,
                "rollout_is=sequence",
                _correction(level="sequence", treatment="mask", lower=0.5, upper=2.0),
                verl.correction(rollout_is="sequence", rollout_is_threshold="0.5_2.0"),
                "bounds 0.5, 2",
            ),
            _trl_mode("token_truncate", level="token", treatment="truncate", upper=1.5),
            _trl_mode("token_mask", level="token", treatment="mask", lower=0.8, upper=1.3),
            _trl_mode("sequence_truncate", level="sequence", treatment="truncate", upper=2.0),
            _trl_mode("sequence_mask", level="sequence", treatment="mask", upper=1.5),
            Case(
                "token, truncate, in the loss",
                openrlhf.NAME,
                "is_correction_mode=clip",
                _loss(RolloutCorrection("token", "truncate", 0.8, 1.3)),
                openrlhf.policy_loss(
                    is_correction_level="token", is_correction_mode="clip", is_correction_threshold=[0.8, 1.3]
                ),
                "clipped; bounds 0.8, 1.3",
            ),
            Case(
                "token, mask, in the loss",
                openrlhf.NAME,
                "is_correction_level=token",
                _loss(MASKED),
                openrlhf.policy_loss(
                    is_correction_level="token", is_correction_mode="mask", is_correction_threshold=[0.8, 1.3]
                ),
                "clipped; bounds 0.8, 1.3",
            ),
            Case(
                "token, seq_mask, in the loss",
                openrlhf.NAME,
                "is_correction_level=seq",
                _loss(RolloutCorrection("token", "seq_mask", 0.9, 1.1)),
                openrlhf.policy_loss(
                    is_correction_level="seq", is_correction_mode="mask", is_correction_threshold=[0.9, 1.1]
                ),
                "clipped; bounds 0.9, 1.1",
            ),
            Case(
                "token, mask, in the loss",
                trl.NAME,
                "token_mask, loss_type=dapo",
                _loss(MASKED),
                trl.grpo_loss(
                    advantages="token_advantages",
                    ratio=True,
                    vllm_importance_sampling_mode="token_mask",
                    vllm_importance_sampling_clip_min=0.8,
                    vllm_importance_sampling_clip_max=1.3,
                ),
                "clipped; bounds 0.8, 1.3",
            ),
            *_weighted("clipped", "vanilla", TOKEN_MEAN, low=0.2, high=0.28),
            *_weighted("gspo_token", "gspo", SEQUENCE_MEAN, low=0.1, high=0.15),
            *_weighted("cispo", "cispo", TOKEN_MEAN, low=0.2, high=0.28),
            *_weighted("sapo", "sapo", SEQUENCE_MEAN),
            *_weighted("gmpo", "geo_mean", SEQUENCE_MEAN, False, low=0.4, high=0.5),
            *_weighted("dppo_tv", "dppo_tv", TOKEN_MEAN, low=0.1, high=0.15),
            *_weighted("dppo_kl", "dppo_kl", TOKEN_MEAN, low=0.1, high=0.15),
            *(_rejection(name, 1.4, 0.7) for name in ("token_k1", "seq_sum_k1")),
            _rejection("seq_mean_k1", 1.15, 0.85),
            *(_rejection(name, 0.1) for name in ("token_k2", "token_k3", "seq_mean_k2", "seq_mean_k3")),
            *(_rejection(name, 0.4) for name in ("seq_sum_k2", "seq_sum_k3", "seq_max_k2", "seq_max_k3")),
            Case("off_policy_mask", trl.NAME, "get_off_policy_mask", _off_policy(0.1), trl.off_policy_mask(0.1), "0.1"),
            Case(
                "off_policy_mask, in the loss",
                trl.NAME,
                "off_policy_mask_threshold",
                policy_loss("clipped", "sequence_mean", False, factor=_keep_near, clip_low=0.2, clip_high=0.2),
                trl.grpo_loss(loss_type="grpo", off_policy_mask_threshold=0.1),
                "clipped; 0.1; sequence_mean",
            ),
        )
    ),
)
