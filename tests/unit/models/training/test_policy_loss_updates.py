"""Updates with each policy loss: independent of the micro-batch size, repeatable, and with a selection over the mini-batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from quartet.config.policy_losses import BUILT_IN_POLICY_LOSSES
from quartet.models.forward.scoring import response_log_probs
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.ppo.losses import PolicyLoss, PolicyLossInput
from quartet.ppo.policy_losses import kl_cov
from tests.unit.models import tiny
from tests.unit.models.updates import (
    LOSS,
    RESPONSES,
    built_in_loss,
    experience,
    largest_difference,
    settings,
    sgd,
    with_outcome_advantages,
)


def updated(name: str, max_tokens: int = 33, seed: int = 5, **changes: Any) -> tuple[Any, dict[str, float]]:
    """Return a model after an update with a built-in loss, and its metrics."""
    model = tiny.causal("llama")
    data = with_outcome_advantages(experience(model))
    loss, options = built_in_loss(name)
    optimizer = create_optimizer(model, 0.0, eps=1e-3)
    optimization = settings(**{"num_mini_batches": 3, "learning_rate": 1e-3, "seed": seed, **changes})
    return model, update_policy(model, optimizer, data, optimization, loss, max_tokens, **options)


@pytest.mark.parametrize("name", BUILT_IN_POLICY_LOSSES)
def test_the_micro_batch_size_does_not_change_an_update(name: str) -> None:
    (first, metrics), *others = [updated(name, max_tokens) for max_tokens in (1, 33, 10_000)]
    for model, other_metrics in others:
        assert largest_difference(first, model) < 1e-5
        assert other_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_an_update_with_a_selection_repeats_to_the_bit(name: str) -> None:
    (first, metrics), (second, other_metrics) = updated(name), updated(name)
    assert metrics == other_metrics
    assert largest_difference(first, second) == 0.0


def test_the_seed_of_the_run_decides_the_tokens_that_clip_cov_drops() -> None:
    # With one mini-batch, the seed decides nothing else.
    models = [updated("clip_cov", seed=seed, num_mini_batches=1, num_epochs=1)[0] for seed in (5, 6)]
    assert largest_difference(*models) > 0


def test_clip_cov_drops_tokens_in_the_first_mini_batch_too() -> None:
    # Before the first optimizer step, every ratio is 1, so that the clip range affects no token.
    _, metrics = updated("clip_cov", num_mini_batches=1, num_epochs=1)
    assert metrics["approx_kl"] == 0.0
    counted = int(experience(tiny.causal("llama")).actor_mask.sum())
    assert metrics["clip_fraction"] == pytest.approx(int(0.3 * counted) / counted)


def test_kl_cov_selects_by_the_old_log_probs_of_the_whole_mini_batch() -> None:
    model = tiny.causal("llama")
    data = with_outcome_advantages(experience(model))
    data = dataclasses.replace(data, actor_mask=np.ones_like(data.actor_mask))
    loss, options = built_in_loss("kl_cov")
    old = response_log_probs(model, data.batch, LOSS.temperature, 10_000).astype(np.float64)
    covariance = (old - old.mean()) * (data.advantages - data.advantages.astype(np.float64).mean())
    chosen = np.argsort(-covariance, kind="stable")[: int(0.3 * len(old))]
    calls: list[set[float]] = []

    def recorded(inputs: PolicyLossInput) -> PolicyLoss:
        assert inputs.selected is not None
        # Log-probs identify the tokens.
        calls.append(set(inputs.old_log_probs[inputs.selected].tolist()))
        return kl_cov(inputs)

    optimization = settings(num_mini_batches=1, num_epochs=2, learning_rate=1e-3)
    # One response per micro-batch.
    update_policy(model, sgd(model), data, optimization, loss, 1, **{**options, "loss_function": recorded})
    assert not any(calls[: len(RESPONSES)])
    selected = sorted(value for call in calls[len(RESPONSES) :] for value in call)
    assert selected == pytest.approx(sorted(old[chosen]), abs=1e-5)


def test_a_selection_leaves_masked_tokens_out() -> None:
    model = tiny.causal("llama")
    data = with_outcome_advantages(experience(model))
    # An extreme advantage outside the mask would change every mean.
    bad = dataclasses.replace(data, advantages=np.where(data.actor_mask != 0, data.advantages, np.nan))
    loss, options = built_in_loss("clip_cov")
    results = []
    for one in (data, bad):
        model = tiny.causal("llama")
        results.append((update_policy(model, sgd(model), one, settings(), loss, 33, **options), model))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0.0
    assert all(bool(torch.isfinite(parameter).all()) for parameter in results[1][1].parameters())
