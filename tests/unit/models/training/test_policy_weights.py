"""Updates with a correction for the difference between engine and trainer, compared with float64 formulas."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from quartet.contract.update import CorrectionLevel, RejectionRule, RolloutCorrection
from quartet.models.training import updates as training
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from tests.unit.models import tiny
from tests.unit.models.updates import (
    CORRECTIONS,
    LOSS,
    RESPONSES,
    ReferenceUpdate,
    built_in_loss,
    experience,
    largest_difference,
    settings,
    sgd,
    with_options,
    with_outcome_advantages,
)

OBSERVED = ("entropy", "rollout_mismatch_kl")
"""Metrics of the old policy. With the engine's old log-probs they are those of the first pass over each mini-batch."""


# Advantages per response change a correction in one place, whatever its kind.
WITH_OUTCOMES = ("all", "off_policy_mask")


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        *(pytest.param(name, False, id=f"{name}-token") for name in CORRECTIONS),
        *(
            pytest.param(name, True, id=f"{name}-outcome", marks=() if name in WITH_OUTCOMES else pytest.mark.slow)
            for name in CORRECTIONS
        ),
    ],
)
def test_a_corrected_update_agrees_with_a_float64_reference_implementation(name: str, outcome: bool) -> None:
    model, loss = tiny.causal("llama"), with_options(**CORRECTIONS[name])
    data, optimization = experience(model), settings(num_mini_batches=3)
    if outcome:
        data = with_outcome_advantages(data)
    reference = ReferenceUpdate(model, data, optimization, loss)
    expected = reference.policy()
    result = update_policy(model, sgd(model), data, optimization, loss, 40)
    if loss.old_log_probs == "rollout":
        expected = {metric: value for metric, value in expected.items() if metric not in OBSERVED}
    assert {metric: result[metric] for metric in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert largest_difference(model, reference.model) < 1e-5
    assert largest_difference(reference.model, uncorrected(outcome)) > 1e-4, "the bounds are too wide for this data"
    for metric in ("importance_masked_fraction", "rejected_fraction", "off_policy_masked_fraction"):
        assert 0 < result.get(metric, 0.5) < 1


@cache
def uncorrected(outcome: bool) -> Any:
    """Return the model after the update of the test above without a correction."""
    model = tiny.causal("llama")
    data = with_outcome_advantages(experience(model)) if outcome else experience(model)
    reference = ReferenceUpdate(model, data, settings(num_mini_batches=3))
    reference.policy()
    return reference.model


@pytest.mark.parametrize("num_mini_batches", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["all", "of_engine_with_masks", "normalize"])
def test_the_micro_batch_size_does_not_change_a_corrected_update(name: str, num_mini_batches: int) -> None:
    models, results = [], []
    data = experience(tiny.causal("llama"))
    for max_tokens in (1, 33, 10_000):
        model = tiny.causal("llama")
        optimization = settings(num_mini_batches=num_mini_batches, learning_rate=1e-3)
        optimizer = create_optimizer(model, 0.0, eps=1e-3)
        results.append(
            update_policy(model, optimizer, data, optimization, with_options(**CORRECTIONS[name]), max_tokens)
        )
        models.append(model)
    assert max(largest_difference(models[0], other) for other in models[1:]) < 1e-5
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4, abs=1e-5)


def forward_passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by one at each forward pass."""
    calls, original = [], training.forward_log_probs

    def count_call(*arguments: Any) -> Any:
        calls.append(None)
        return original(*arguments)

    monkeypatch.setattr(training, "forward_log_probs", count_call)
    return calls


@pytest.mark.parametrize("num_mini_batches", [1, 3])
@pytest.mark.parametrize(
    ("name", "extra_passes"),
    [("token_mask", -1), ("off_policy_mask", -1), ("normalize", 0), ("reject_tokens", 0), ("of_engine", None)],
)
def test_only_statistics_of_the_step_need_another_forward_pass(
    name: str, extra_passes: int | None, num_mini_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs, and a pass for the old log-probs of each mini-batch; the first one's are free, and all with the engine's."""
    model = tiny.causal("llama")
    data, calls = experience(model), forward_passes(monkeypatch)
    optimization = settings(num_mini_batches=num_mini_batches)
    update_policy(model, sgd(model), data, optimization, with_options(**CORRECTIONS[name]), 1000)
    expected = 2 * num_mini_batches + (0 if extra_passes is None else num_mini_batches + extra_passes)
    assert len(calls) == expected


def test_the_old_log_probs_of_the_engine_do_not_count_the_difference_twice() -> None:
    """With one mini-batch and one epoch the loss is that of the ratio of the policy to the engine, by its definition."""
    model = tiny.causal("llama")
    data = experience(model)
    loss = with_options(old_log_probs="rollout", entropy_coefficient=0.0, kl_loss="none")
    optimization = settings(num_epochs=1, num_mini_batches=1)
    reference = ReferenceUpdate(model, data, optimization, loss)
    trainer = [reference.distribution(row)[0].detach() for row in range(len(RESPONSES))]
    expected, count = 0.0, 0
    for row, log_probs in enumerate(trainer):
        columns = (reference.of(name, row).tolist() for name in ("log_probs", "advantages", "actor_mask"))
        for new, engine, advantage, counts in zip(log_probs.tolist(), *columns, strict=True):
            if counts:
                ratio = np.exp(new - engine)
                objective = min(ratio * advantage, np.clip(ratio, 1 - 0.1, 1 + 0.15) * advantage)
                expected -= max(objective, 1.5 * advantage) if advantage < 0 else objective
                count += 1
    result = update_policy(model, sgd(model), data, optimization, loss, 40)
    assert result["policy_loss"] == pytest.approx(expected / count, abs=1e-6)
    assert result["importance_weight"] == 1
    observed = update_policy(tiny.causal("llama"), sgd(model), data, optimization, with_options(), 40)
    for metric in OBSERVED:
        assert result[metric] == pytest.approx(observed[metric]), (
            "with one mini-batch all tokens are seen at the old weights"
        )


def test_the_weights_of_an_older_policy_cover_its_distance() -> None:
    """A decoupled loss: the clip compares with the policy at the start of the update, the weight that policy with the engine."""
    model = tiny.causal("llama")
    data = experience(model)
    generator = np.random.default_rng(3)
    drift = generator.normal(0, 0.5, len(data.log_probs)).astype(np.float32)
    older = dataclasses.replace(data, log_probs=data.log_probs + drift)
    correction = RolloutCorrection("token", "mask", upper=1.5)
    loss = with_options(rollout_correction=correction)
    optimization = settings(num_epochs=2, num_mini_batches=2, learning_rate=0.02)
    reference = ReferenceUpdate(model, older, optimization, loss)
    expected = reference.policy()
    result = update_policy(model, sgd(model), older, optimization, loss, 40)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert result["rollout_mismatch_kl"] > 0.05
    assert 0.1 < result["importance_masked_fraction"] < 0.5
    assert result["importance_ess"] < 0.9


def test_the_importance_weight_of_a_response_in_gmpo_is_the_geometric_mean_of_its_tokens() -> None:
    data = with_outcome_advantages(experience(tiny.causal("llama")))
    noise = np.random.default_rng(2).standard_normal(len(data.log_probs)).astype(np.float32)
    data = dataclasses.replace(data, log_probs=data.log_probs + noise)

    def updated(name: str, level: CorrectionLevel) -> Any:
        model, (loss, options) = tiny.causal("llama"), built_in_loss(name)
        loss = dataclasses.replace(loss, rollout_correction=RolloutCorrection(level, upper=1e6))
        update_policy(model, sgd(model), data, settings(num_mini_batches=3), loss, 40, **options)
        return model

    # No bound acts, so level geometric_mean gives the same weights.
    assert largest_difference(updated("gmpo", "token"), updated("gmpo", "geometric_mean")) < 1e-6
    assert largest_difference(updated("sapo", "token"), updated("sapo", "geometric_mean")) > 1e-5


def test_a_step_whose_tokens_are_all_rejected_takes_no_optimizer_step() -> None:
    model, before = tiny.causal("llama"), tiny.causal("llama")
    correction = RolloutCorrection(rejection=(RejectionRule("token_k2", 1e-12),))
    result = update_policy(
        model, sgd(model), experience(model), settings(), with_options(rollout_correction=correction), 40
    )
    assert (result["optimizer_steps"], result["rejected_fraction"]) == (0, 1)
    assert largest_difference(model, before) == 0
    assert all(map(np.isfinite, result.values()))


def test_the_default_correction_and_none_have_the_same_bits_if_engine_and_trainer_agree() -> None:
    model, other = tiny.causal("llama"), tiny.causal("llama")
    data = experience(model)
    optimization = settings(num_epochs=0, num_mini_batches=1)
    observed: list[Any] = []
    original = training._PolicyExperience.observations

    def keep(policy: Any) -> dict[str, float]:
        observed.append(policy._observed.numpy().copy())
        return original(policy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training._PolicyExperience, "observations", keep)
        update_policy(model, sgd(model), data, optimization, LOSS, 40)
    same = dataclasses.replace(data, log_probs=observed[0])
    for each, correction in ((model, RolloutCorrection("token", upper=2.0)), (other, RolloutCorrection())):
        loss = with_options(rollout_correction=correction)
        update_policy(each, sgd(each), same, settings(num_mini_batches=1), loss, 40)
    assert largest_difference(model, other) == 0
