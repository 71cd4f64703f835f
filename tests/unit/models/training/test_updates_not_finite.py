"""NaN and infinity in an update: they end the update or skip a step, and never change a weight."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.random_streams import permutation
from quartet.contract.update import Experience, PolicyLossSettings, RejectionRule, RolloutCorrection, ValueLossSettings
from quartet.errors import ComputationFailed
from quartet.models.training import updates as training
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from tests.unit.models import tiny
from tests.unit.models.updates import (
    LOSS,
    OPTIONS,
    PROMPTS,
    RESPONSES,
    experience,
    largest_difference,
    settings,
    sgd,
    with_options,
)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_stop_the_update_before_any_weight_changes(bad: float) -> None:
    model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
    data = experience(model)
    data.advantages[:] = bad
    data.returns[3] = bad
    before, critic_before = copy.deepcopy(model), copy.deepcopy(critic)
    optimizer = create_optimizer(model, 0.1, weight_decay=0.1)
    with pytest.raises(ComputationFailed, match="policy update"):
        update_policy(model, optimizer, data, settings(), LOSS, 1000)
    with pytest.raises(ComputationFailed, match="value update"):
        update_value(critic, sgd(critic), data, settings(num_mini_batches=1), ValueLossSettings(), 1000)
    assert largest_difference(model, before) == 0
    assert largest_difference(critic, critic_before) == 0
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_update_of_skipped_steps_changes_nothing_and_reports_finite_metrics(bad: float) -> None:
    model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
    data = experience(model)
    data.advantages[:] = bad
    data.returns[:] = bad
    before, critic_before = copy.deepcopy(model), copy.deepcopy(critic)
    optimizer, critic_optimizer = (create_optimizer(m, 0.1, weight_decay=0.1) for m in (model, critic))
    optimization = settings(skip_non_finite=True)
    reports = (
        update_policy(model, optimizer, data, optimization, with_options(**OPTIONS["all"], target_kl=1e-9), 1000),
        update_value(critic, critic_optimizer, data, optimization, ValueLossSettings(), 1000),
    )
    for report in reports:
        assert all(map(np.isfinite, report.values()))
        assert (report["optimizer_steps"], report["skipped_steps"]) == (0, 4)
        assert not {"policy_loss", "value_loss", "grad_norm", "clip_fraction"} & set(report), (
            "a metric without values must be absent, not 0"
        )
    assert largest_difference(model, before) == 0
    assert largest_difference(critic, critic_before) == 0
    assert not optimizer.state
    assert not critic_optimizer.state
    assert all(parameter.grad is None for parameter in (*model.parameters(), *critic.parameters()))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_skipped_step_does_not_affect_the_other_steps(which: int) -> None:
    models, metrics = [tiny.causal("llama") for _ in range(2)], []
    data, optimization = experience(models[0]), settings(num_mini_batches=3, num_epochs=1, skip_non_finite=True)
    bounds = np.cumsum([0, *RESPONSES])
    bad_rows = np.array_split(permutation(5, 3, 0, len(PROMPTS)), 3)[which]
    broken, masked = data.advantages.copy(), data.actor_mask.copy()
    for row in bad_rows:
        broken[bounds[row] : bounds[row + 1]] = np.nan
        masked[bounds[row] : bounds[row + 1]] = 0
    for model, changes in zip(models, ({"advantages": broken}, {"actor_mask": masked}), strict=True):
        changed = dataclasses.replace(data, **changes)  # type: ignore[arg-type]
        optimizer = create_optimizer(model, 0.0, weight_decay=0.1)
        metrics.append(update_policy(model, optimizer, changed, optimization, LOSS, 40))
    assert largest_difference(*models) < 1e-7
    assert (metrics[0].pop("skipped_steps"), metrics[1].pop("skipped_steps")) == (1, 0)
    assert metrics[0] == pytest.approx(metrics[1])
    assert metrics[0]["optimizer_steps"] == 2


def shift_recomputed(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Add ``by`` to the first log-prob of each forward pass that is not trained on."""
    original = training.forward_log_probs

    def shifted(*arguments: Any) -> Any:
        log_probs, entropies = original(*arguments)
        if not torch.is_grad_enabled():
            log_probs[0] += by
        return log_probs, entropies

    monkeypatch.setattr(training, "forward_log_probs", shifted)


def test_the_first_step_after_a_skipped_one_is_taken_regardless_of_its_kl(monkeypatch: pytest.MonkeyPatch) -> None:
    # The old log-probs differ slightly, as if another kernel had computed them.
    shift_recomputed(monkeypatch, 0.1)
    model = tiny.causal("llama")
    data, optimization = experience(model), settings(num_mini_batches=3, num_epochs=1, skip_non_finite=True)
    data.actor_mask[:] = 1
    bounds = np.cumsum([0, *RESPONSES])
    for row in np.array_split(permutation(5, 3, 0, len(PROMPTS)), 3)[0]:
        data.advantages[bounds[row] : bounds[row + 1]] = np.nan
    result = update_policy(model, sgd(model), data, optimization, with_options(target_kl=1e-6), 1000)
    assert (result["optimizer_steps"], result["skipped_steps"]) == (1, 1)


def test_an_old_log_prob_of_minus_infinity_counts_as_non_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a check, the ratio would be clamped to e^20, which gives a finite but extreme step.
    shift_recomputed(monkeypatch, -np.inf)
    model = tiny.causal("llama")
    data, optimization = experience(model), settings(num_mini_batches=3, num_epochs=1)
    data.actor_mask[:] = 1
    with pytest.raises(ComputationFailed, match="2 old log-probs"):
        update_policy(model, sgd(model), data, optimization, LOSS, 1000)
    optimization = dataclasses.replace(optimization, skip_non_finite=True)
    result = update_policy(model, sgd(model), data, optimization, LOSS, 1000)
    assert (result["optimizer_steps"], result["skipped_steps"]) == (1, 2)
    assert all(map(np.isfinite, result.values()))


@pytest.mark.parametrize(
    "correction",
    [
        RolloutCorrection(rejection=(RejectionRule("token_k2", 1e-9),)),
        RolloutCorrection(rejection=(RejectionRule("seq_mean_k1", 1.5),)),
        RolloutCorrection(off_policy_mask=0.01),
        RolloutCorrection("token", "mask", 0.9, 1.1),
    ],
    ids=["token rejection", "response rejection", "off-policy mask", "importance weights"],
)
def test_a_nan_from_the_engine_that_decides_what_is_masked_stops_the_update(correction: RolloutCorrection) -> None:
    model, loss = tiny.causal("llama"), with_options(rollout_correction=correction)
    data = experience(model)
    data.log_probs[np.flatnonzero(data.actor_mask)[7]] = np.nan
    optimization = settings(num_epochs=1, num_mini_batches=1)
    with pytest.raises(ComputationFailed, match="policy update"):
        update_policy(model, sgd(model), data, optimization, loss, 40)
    optimization = dataclasses.replace(optimization, skip_non_finite=True)
    result = update_policy(model, sgd(model), data, optimization, loss, 40)
    assert (result["optimizer_steps"], result["skipped_steps"]) == (0, 1)
    assert all(map(np.isfinite, result.values()))
    assert largest_difference(model, tiny.causal("llama")) == 0


def test_a_nan_from_the_engine_at_a_masked_token_is_ignored() -> None:
    models, loss = [tiny.causal("llama") for _ in range(2)], with_options(**OPTIONS["all"])
    clean = experience(models[0])
    broken = dataclasses.replace(clean, log_probs=np.where(clean.actor_mask == 0, np.nan, clean.log_probs))
    reports = [
        update_policy(model, sgd(model), data, settings(), loss, 40)
        for model, data in zip(models, (clean, broken), strict=True)
    ]
    assert largest_difference(*models) == 0
    assert reports[0]["importance_weight"] == reports[1]["importance_weight"]
    assert all(map(np.isfinite, reports[1].values()))


def one_broken_sequence(data: Experience, model: Any) -> None:
    """Make the log-probs of one sequence NaN, by the embedding of a token that only this sequence has."""
    ids = data.batch.token_ids
    token = next(int(token) for token in ids[: PROMPTS[0]] if (ids == token).sum() == 1)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan


def test_non_finite_old_log_probs_stop_the_update_before_its_first_step() -> None:
    model = tiny.causal("llama")
    data = experience(model)
    one_broken_sequence(data, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimization in (settings(num_mini_batches=3), settings(num_mini_batches=1), settings(num_epochs=0)):
        with pytest.raises(ComputationFailed, match="policy update"):
            update_policy(model, sgd(model), data, optimization, LOSS, 1000)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("loss", [LOSS, with_options(**OPTIONS["all"])], ids=["plain", "all options"])
def test_a_sequence_with_non_finite_old_log_probs_does_not_change_the_weights(loss: PolicyLossSettings) -> None:
    model = tiny.causal("llama")
    data = experience(model)
    one_broken_sequence(data, model)
    before = copy.deepcopy(model)
    result = update_policy(model, sgd(model), data, settings(num_mini_batches=3, skip_non_finite=True), loss, 40)
    # The sequence is in one of three mini-batches in each of two epochs.
    assert (result["optimizer_steps"], result["skipped_steps"]) == (4, 2)
    assert all(map(np.isfinite, result.values()))
    moved = []
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter.isnan(), old.isnan())
        moved.append((parameter - old).nan_to_num().abs().max().item())
    assert max(moved) > 1e-3
    still = update_policy(before, sgd(before), data, settings(num_epochs=0, skip_non_finite=True), loss, 40)
    assert all(map(np.isfinite, still.values()))
    assert still["entropy"] > 0
    assert still["rollout_mismatch_kl"] == pytest.approx(result["rollout_mismatch_kl"], rel=1e-4)
