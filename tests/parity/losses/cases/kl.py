"""Estimates of the KL divergence, the KL loss, and the controller of its coefficient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quartet.ppo.kl import AdaptiveKLController, kl_estimate
from quartet.ppo.losses import kl_loss, loss_weights
from tests.parity.losses.batch import Batch, with_gradient
from tests.parity.losses.case import Case, Group, Results, unique
from tests.parity.losses.peers import openrlhf, trl, verl

OBSERVED = (4.0, 7.5, 6.2, 0.5, 30.0)
"""KL of five steps, in nats per response, around the target of 6."""


def _estimate(kind: str, gradient: bool = False) -> Callable[[Batch], Results]:
    def run(batch: Batch) -> Results:
        results = {"estimates": kl_estimate(batch.log_probs, batch.reference_log_probs, kind)}  # type: ignore[arg-type]
        if gradient:
            results |= with_gradient(
                lambda log_probs: kl_estimate(log_probs, batch.reference_log_probs, kind).sum(),  # type: ignore[arg-type]
                batch.log_probs,
                batch,
            )
        return results

    return run


def _loss(batch: Batch) -> Results:
    weights = loss_weights(batch.mask, batch.lengths, "token_mean")
    return with_gradient(
        lambda log_probs: 0.1 * kl_loss(log_probs, batch.reference_log_probs, weights, "k3"), batch.log_probs, batch
    )


def _controller(batch: Batch) -> Results:
    controller = AdaptiveKLController(0.05, target=6.0, horizon=1000.0)
    coefficients = []
    for kl in OBSERVED:
        controller.update(kl, 96)
        coefficients.append(controller.value)
    return {"coefficients": torch.tensor(coefficients, dtype=torch.float64)}


GROUP = Group(
    "KL divergence",
    "kl",
    unique(
        (
            Case("k1", verl.NAME, "kl", _estimate("k1", True), verl.kl("kl", True)),
            Case("absolute", verl.NAME, "abs", _estimate("absolute", True), verl.kl("abs", True)),
            Case("k2", verl.NAME, "mse", _estimate("k2", True), verl.kl("mse", True)),
            Case("k3", verl.NAME, "low_var_kl", _estimate("k3", True), verl.kl("low_var_kl", True)),
            *(
                Case(
                    kind, openrlhf.NAME, f"kl_estimator={kind}", _estimate(kind), openrlhf.kl(kind), precision="float32"
                )
                for kind in ("k1", "k2", "k3")
            ),
            Case(
                "kl_loss k3",
                trl.NAME,
                "GRPOTrainer beta",
                _loss,
                trl.grpo_loss(advantages="zero", beta=0.1, loss_type="bnpo"),
                "beta 0.1, advantages 0",
            ),
            Case(
                "kl_controller adaptive",
                verl.NAME,
                "kl_ctrl.type=adaptive",
                _controller,
                verl.kl_controller(OBSERVED, 96, init_kl_coef=0.05, target_kl=6.0, horizon=1000.0),
                "coefficient 0.05, target 6, horizon 1000",
            ),
            Case(
                "kl_controller adaptive",
                openrlhf.NAME,
                "AdaptiveKLController",
                _controller,
                openrlhf.kl_controller(OBSERVED, 96, init_kl_coef=0.05, target=6.0, horizon=1000.0),
                "coefficient 0.05, target 6, horizon 1000",
            ),
        )
    ),
)
