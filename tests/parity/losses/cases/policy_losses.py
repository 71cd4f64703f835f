"""Policy losses, by their names in the config, with the gradient of every token's log-prob."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.ppo.losses import PolicyLossInput, SelectionInput, loss_weights
from tests.parity.losses.batch import Batch, with_gradient
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import openrlhf, trl, verl

ORDER = torch.tensor([5, 2, 7, 0, 3, 1, 6, 4, *range(8, 100)])
"""Order that replaces the random choice of Clip-Cov on both sides."""


def ours(
    name: str,
    aggregation: str = "token_mean",
    token_level: bool = True,
    parameters: Mapping[str, float] | None = None,
    factor: Callable[[Batch], Tensor] | None = None,
    divisor: float = 1.0,
    **settings: Any,
) -> Callable[[Batch], Results]:
    """Return a built-in loss and its gradient. ``token_level``: with advantages that differ within a response.

    ``factor`` returns the correction weights [tokens], by which the weights of the loss are multiplied.
    """

    def run(batch: Batch) -> Results:
        spec = BUILT_IN_POLICY_LOSSES[name]
        advantages = batch.token_advantages if token_level else batch.advantages
        mask, chosen = batch.mask.bool(), spec.resolve(parameters or {})
        weights = loss_weights(batch.mask, batch.lengths, aggregation, divisor)  # type: ignore[arg-type]
        if factor is not None:
            weights = weights * factor(batch)
        selected = None
        if spec.select_tokens is not None:
            # The peers select by the new log-probs, in the same way.
            choice = SelectionInput(batch.log_probs[mask], advantages[mask], chosen, lambda n: ORDER[n > ORDER])
            selected = torch.zeros_like(mask).masked_scatter(mask, _function(spec.select_tokens)(choice))

        def loss(log_probs: Tensor) -> Tensor:
            inputs = PolicyLossInput(
                log_probs=log_probs,
                old_log_probs=batch.old_log_probs,
                rollout_log_probs=batch.rollout_log_probs,
                advantages=advantages,
                mask=mask,
                weights=weights,
                lengths=batch.lengths,
                parameters=chosen,
                selected=selected,
                **settings,
            )
            result: Tensor = _function(spec.function)(inputs).loss
            return result

        return with_gradient(loss, batch.log_probs, batch)

    return run


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low": low, "clip_high": high}


def _verl_clip(low: float, high: float) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high}


OFF = 1e9
"""A dual clip that never acts."""
WIDE, NARROW, THRESHOLDS = (0.2, 0.28), (0.1, 0.15), (0.1, 0.15)
MEAN = "sequence_mean"
COVARIANCE = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}

GROUP = Group(
    "Policy losses",
    "policy_losses",
    unique(
        (
            Case(
                "clipped",
                verl.NAME,
                "vanilla",
                ours("clipped", **_clip(*WIDE)),
                verl.policy_loss("vanilla", **_verl_clip(*WIDE), clip_ratio_c=OFF),
                "clip 0.2, 0.28; token_mean",
            ),
            Case(
                "clipped",
                verl.NAME,
                "vanilla",
                ours("clipped", MEAN, dual_clip=3.0, **_clip(*WIDE)),
                verl.policy_loss("vanilla", "seq-mean-token-mean", **_verl_clip(*WIDE), clip_ratio_c=3.0),
                "clip 0.2, 0.28; dual_clip 3; sequence_mean",
            ),
            Case(
                "clipped",
                openrlhf.NAME,
                "ppo",
                ours("clipped", dual_clip=3.0, **_clip(*WIDE)),
                openrlhf.policy_loss(clip_eps_low=0.2, clip_eps_high=0.28, dual_clip=3.0),
                "clip 0.2, 0.28; dual_clip 3; token_mean",
            ),
            Case(
                "clipped",
                trl.NAME,
                "loss_type=dapo",
                ours("clipped", **_clip(*WIDE)),
                trl.grpo_loss(advantages="token_advantages", loss_type="dapo", epsilon_high=0.28),
                "clip 0.2, 0.28; token_mean",
            ),
            Case(
                "clipped",
                trl.NAME,
                "loss_type=grpo",
                ours("clipped", MEAN, token_level=False, **_clip(*WIDE)),
                trl.grpo_loss(loss_type="grpo", epsilon_high=0.28),
                "clip 0.2, 0.28; sequence_mean",
            ),
            Case(
                "clipped",
                trl.NAME,
                "loss_type=dr_grpo",
                ours("clipped", "sequence_mean_token_sum_norm", token_level=False, divisor=16.0, **_clip(*WIDE)),
                trl.grpo_loss(loss_type="dr_grpo", epsilon_high=0.28, max_completion_length=16),
                "clip 0.2, 0.28; sequence_mean_token_sum_norm, divisor 16",
            ),
            Case(
                "clipped",
                trl.NAME,
                "RLOOTrainer",
                ours("clipped", MEAN, token_level=False, ratio_level="sequence", **_clip(0.2, 0.2)),
                trl.rloo_loss(),
                "clip 0.2; ratio_level sequence; sequence_mean",
            ),
            Case(
                "gspo",
                trl.NAME,
                "importance_sampling_level=sequence",
                ours("gspo", MEAN, token_level=False, **_clip(*NARROW)),
                trl.grpo_loss(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.15),
                "clip 0.1, 0.15; sequence_mean",
            ),
            Case(
                "gspo",
                openrlhf.NAME,
                "policy_loss_type=gspo",
                ours("gspo", MEAN, token_level=False, **_clip(*NARROW)),
                openrlhf.policy_loss(False, policy_loss_type="gspo", clip_eps_low=0.1, clip_eps_high=0.15),
                "clip 0.1, 0.15; sequence_mean",
            ),
            Case(
                "gspo_token",
                verl.NAME,
                "gspo",
                ours("gspo_token", MEAN, **_clip(*NARROW)),
                verl.policy_loss("gspo", "seq-mean-token-mean", **_verl_clip(*NARROW)),
                "clip 0.1, 0.15; sequence_mean",
            ),
            Case(
                "cispo",
                verl.NAME,
                "cispo",
                ours("cispo", **_clip(*WIDE)),
                verl.policy_loss("cispo", **_verl_clip(*WIDE)),
                "clip 0.2, 0.28; token_mean",
            ),
            Case(
                "cispo",
                trl.NAME,
                "loss_type=cispo",
                ours("cispo", **_clip(1.0, 1.5)),
                trl.grpo_loss(advantages="token_advantages", loss_type="cispo", epsilon_high=2.5),
                "clip 1 (no lower bound), 1.5; token_mean",
                "TRL's epsilon_high is the ratio, 2.5",
            ),
            Case(
                "sapo",
                verl.NAME,
                "sapo",
                ours("sapo", MEAN, parameters={"tau_positive": 1.0, "tau_negative": 1.5}),
                verl.policy_loss("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.5),
                "tau 1, 1.5; sequence_mean",
            ),
            Case(
                "sapo",
                trl.NAME,
                "loss_type=sapo",
                ours("sapo", MEAN, token_level=False, parameters={"tau_positive": 1.0, "tau_negative": 1.05}),
                trl.grpo_loss(loss_type="sapo"),
                "tau 1, 1.05; sequence_mean",
            ),
            Case(
                "gmpo",
                verl.NAME,
                "geo_mean",
                ours("gmpo", MEAN, token_level=False, **_clip(0.4, 0.5)),
                verl.policy_loss("geo_mean", token_level=False, **_verl_clip(0.4, 0.5)),
                "clip 0.4, 0.5; sequence_mean",
            ),
            Case(
                "gmpo",
                trl.NAME,
                "GMPOTrainer",
                ours("gmpo", MEAN, token_level=False, **_clip(0.4, 0.5)),
                trl.grpo_loss("GMPOTrainer", epsilon=0.4, epsilon_high=0.5),
                "clip 0.4, 0.5; sequence_mean",
            ),
            Case(
                "kl_cov",
                verl.NAME,
                "kl_cov",
                ours("kl_cov", parameters={"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}),
                verl.policy_loss("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=0.5),
                "kl_cov_ratio 0.1, ppo_kl_coef 0.5",
                "selected by the new log-probs",
            ),
            Case(
                "dppo_tv",
                verl.NAME,
                "dppo_tv",
                ours("dppo_tv", parameters={"ratio_cap": 2.0}, **_clip(*THRESHOLDS)),
                verl.policy_loss("dppo_tv", **_verl_clip(*THRESHOLDS), clip_ratio_c=2.0),
                "clip 0.1, 0.15; ratio_cap 2",
            ),
            Case(
                "dppo_kl",
                verl.NAME,
                "dppo_kl",
                ours("dppo_kl", parameters={"ratio_cap": 2.0}, **_clip(*THRESHOLDS)),
                verl.policy_loss("dppo_kl", **_verl_clip(*THRESHOLDS), clip_ratio_c=2.0),
                "clip 0.1, 0.15; ratio_cap 2",
            ),
            Case(
                "clip_cov",
                verl.NAME,
                "clip_cov",
                ours("clip_cov", parameters=COVARIANCE, **_clip(OFF, OFF)),
                verl.policy_loss("clip_cov", order=ORDER, **_verl_clip(OFF, OFF), **COVARIANCE),
                "clip_cov_ratio 0.1, lb 0.2, ub 5",
                "selected by the new log-probs, in the same order, without a ratio clip: verl chooses only unclipped tokens",
            ),
        )
    ),
)
