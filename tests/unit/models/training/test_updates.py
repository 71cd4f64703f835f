"""PPO updates, compared with an independent float64 implementation: splits, ratios, order and early stopping."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from quartet.contract.random_streams import permutation
from quartet.contract.update import PolicyLossSettings, ValueLossSettings
from quartet.errors import InvalidRequest
from quartet.models.training import updates as training
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.ppo.losses import PolicyLoss, PolicyLossInput
from quartet.ppo.policy_losses import clipped
from tests.unit.models import tiny
from tests.unit.models.updates import (
    LOSS,
    OPTIONS,
    PROMPTS,
    RESPONSES,
    ReferenceUpdate,
    experience,
    largest_difference,
    settings,
    sgd,
    with_options,
    with_outcome_advantages,
)


@pytest.mark.parametrize("num_mini_batches", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_policy_update_agrees_with_a_float64_reference_implementation(kind: str, num_mini_batches: int) -> None:
    model = tiny.causal(kind)
    data, optimization = experience(model), settings(num_mini_batches=num_mini_batches)
    reference = ReferenceUpdate(model, data, optimization)
    expected = reference.policy()
    before = copy.deepcopy(model)
    result = update_policy(model, sgd(model), data, optimization, LOSS, 40)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < result["clip_fraction"] < 1
    assert largest_difference(model, reference.model) < 1e-5
    assert largest_difference(model, before) > 1e-3
    assert result["optimizer_steps"] == 2 * num_mini_batches
    assert result["learning_rate"] == 0.05


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_agrees_with_the_reference_implementation(option: str) -> None:
    model = tiny.causal("llama")
    data, optimization, loss = (
        with_outcome_advantages(experience(model)),
        settings(num_mini_batches=3),
        with_options(**OPTIONS[option]),
    )
    reference, without = ReferenceUpdate(model, data, optimization, loss), ReferenceUpdate(model, data, optimization)
    expected = reference.policy()
    without.policy()
    result = update_policy(model, sgd(model), data, optimization, loss, 40)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < result["clip_fraction"] < 1
    assert largest_difference(model, reference.model) < 1e-5
    assert largest_difference(reference.model, without.model) > 1e-4


def test_the_update_ends_before_a_step_with_a_kl_above_the_target() -> None:
    model = tiny.causal("llama")
    data, optimization = experience(model), settings(num_mini_batches=3)
    unbounded = ReferenceUpdate(model, data, optimization)
    unbounded.policy()
    bound = (unbounded.kl_seen[1] + max(unbounded.kl_seen)) / 2
    reference = ReferenceUpdate(model, data, optimization, with_options(target_kl=bound))
    expected = reference.policy()
    assert 2 <= expected["optimizer_steps"] < 6
    result = update_policy(model, sgd(model), data, optimization, with_options(target_kl=bound), 40)
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert largest_difference(model, reference.model) < 1e-5
    assert result["skipped_steps"] == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("bound", "steps"), [(1e-12, 1), (1e6, 4), (0.0, 4)])
def test_the_first_step_is_always_taken_and_a_target_kl_of_zero_is_off(bound: float, steps: int) -> None:
    models = [tiny.causal("llama") for _ in range(2)]
    data, loss = experience(models[0]), with_options(target_kl=bound)
    result = update_policy(models[0], sgd(models[0]), data, settings(num_mini_batches=1, num_epochs=4), loss, 1000)
    update_policy(models[1], sgd(models[1]), data, settings(num_mini_batches=1, num_epochs=steps), LOSS, 1000)
    assert result["optimizer_steps"] == steps
    assert largest_difference(*models) == 0


@pytest.mark.parametrize("clip", [0.2, 50.0])
def test_a_value_update_agrees_with_a_float64_reference_implementation(clip: float) -> None:
    model = ValueModel.of_classifier(tiny.classifier("llama"))
    data, optimization = experience(None), settings(num_mini_batches=3)
    reference = ReferenceUpdate(model, data, optimization)
    expected = reference.value(clip)
    result = update_value(model, sgd(model), data, optimization, ValueLossSettings(clip), 40)
    assert result["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-4)
    assert largest_difference(model, reference.model) < 1e-5
    assert (result["value_clip_fraction"] > 0) == (clip == 0.2)
    assert result["optimizer_steps"] == 6


@pytest.mark.parametrize("loss", [LOSS, with_options(**OPTIONS["all"])], ids=["plain", "all options"])
@pytest.mark.parametrize("num_mini_batches", [1, 3])
def test_the_micro_batch_size_does_not_change_the_weights(num_mini_batches: int, loss: PolicyLossSettings) -> None:
    policies, critics = [], []
    data = experience(tiny.causal("llama"))
    for max_tokens in (1, 33, 10_000):
        model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
        optimization = settings(num_mini_batches=num_mini_batches, learning_rate=1e-3)
        # An eps far above the rounding errors of the gradients. With 1e-8, a gradient of 1e-9 would cause a large step of Adam.
        update_policy(model, create_optimizer(model, 0.0, eps=1e-3), data, optimization, loss, max_tokens)
        update_value(
            critic, create_optimizer(critic, 0.0, eps=1e-3), data, optimization, ValueLossSettings(), max_tokens
        )
        policies.append(model)
        critics.append(critic)
    assert max(largest_difference(policies[0], other) for other in policies[1:]) < 1e-5
    assert max(largest_difference(critics[0], other) for other in critics[1:]) < 1e-5


@pytest.mark.parametrize("num_mini_batches", [1, 3])
def test_the_ratio_starts_at_exactly_one(num_mini_batches: int) -> None:
    deviations: list[float] = []

    def record_ratio(inputs: PolicyLossInput) -> PolicyLoss:
        deviations.append(float((inputs.log_probs.detach() - inputs.old_log_probs).exp().sub(1).abs().max()))
        return clipped(inputs)

    model = tiny.causal("llama")
    data = experience(model)
    update_policy(model, sgd(model), data, settings(num_mini_batches=num_mini_batches), LOSS, 1000, record_ratio)
    assert deviations[0] == 0.0
    assert min(deviations[1:]) > 1e-3


def test_old_log_probs_come_from_the_weights_before_the_first_epoch() -> None:
    model = tiny.causal("llama")
    data = experience(model)
    constant_weights = settings(num_mini_batches=3, num_epochs=1, learning_rate=0.0)
    assert update_policy(model, sgd(model), data, constant_weights, LOSS, 40)["approx_kl"] == pytest.approx(
        0.0, abs=1e-9
    )
    changed_weights = settings(num_mini_batches=3, num_epochs=1)
    assert update_policy(model, sgd(model), data, changed_weights, LOSS, 40)["approx_kl"] > 1e-4


def test_the_same_update_gives_the_same_bits() -> None:
    results = []
    for _ in range(2):
        model = tiny.causal("llama")
        optimizer = create_optimizer(model, 0.0, weight_decay=0.01)
        metrics = update_policy(model, optimizer, experience(model), settings(learning_rate=1e-3), LOSS, 40)
        results.append((metrics, [parameter.detach().numpy().tobytes() for parameter in model.parameters()]))
    assert results[0] == results[1]


def test_the_seed_orders_the_mini_batches() -> None:
    models = [tiny.causal("llama") for _ in range(2)]
    for seed, model in enumerate(models):
        update_policy(model, sgd(model), experience(model), settings(seed=seed), LOSS, 40)
    assert largest_difference(*models) > 1e-6


def test_a_mini_batch_without_masked_tokens_takes_no_step() -> None:
    model = tiny.causal("llama")
    order = permutation(5, 3, 0, len(PROMPTS))
    data = experience(model)
    bounds = np.cumsum([0, *RESPONSES])
    for skipped in np.array_split(order, 3)[:2]:
        mask = np.ones_like(data.actor_mask)
        for row in skipped:
            mask[bounds[row] : bounds[row + 1]] = 0
        changed = dataclasses.replace(data, actor_mask=mask)
        result = update_policy(model, sgd(model), changed, settings(num_mini_batches=3, num_epochs=1), LOSS, 40)
        assert result["optimizer_steps"] == 2
        assert all(np.isfinite(value) for value in result.values())
    fully_masked = dataclasses.replace(data, actor_mask=np.zeros_like(data.actor_mask))
    before = copy.deepcopy(model)
    result = update_policy(model, sgd(model), fully_masked, settings(), LOSS, 40)
    assert result["optimizer_steps"] == 0
    assert not {"policy_loss", "grad_norm"} & set(result)
    assert result["entropy"] > 0, "the entropy of the old policy does not depend on the mask"
    assert np.isfinite(result["rollout_mismatch_kl"])
    assert largest_difference(model, before) == 0


def forward_passes(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return a list that grows by one at each call of this function of the training module."""
    calls, original = [], getattr(training, name)

    def count_call(*arguments: Any) -> Any:
        calls.append(name)
        return original(*arguments)

    monkeypatch.setattr(training, name, count_call)
    return calls


@pytest.mark.parametrize(("num_mini_batches", "passes"), [(1, 2), (3, 2 * 3 + 2)])
def test_old_log_probs_need_a_forward_pass_except_for_the_first_mini_batch(
    num_mini_batches: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.causal("llama")
    data = experience(model)
    calls = forward_passes(monkeypatch, "forward_log_probs")
    update_policy(model, sgd(model), data, settings(num_mini_batches=num_mini_batches), LOSS, 1000)
    assert len(calls) == passes


NO_STEP = {"optimizer_steps": 0.0, "skipped_steps": 0.0}


def test_zero_epochs_change_no_weights_and_report_entropy_and_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
    data, before, critic_before = experience(model), copy.deepcopy(model), copy.deepcopy(critic)
    once = settings(num_mini_batches=1, num_epochs=1, learning_rate=0.0)
    expected = update_policy(copy.deepcopy(model), sgd(model), data, once, with_options(**OPTIONS["importance"]), 1000)
    policies, values = (forward_passes(monkeypatch, name) for name in ("forward_log_probs", "forward_values"))
    optimizer = create_optimizer(model, 0.5, weight_decay=0.1)
    none = settings(num_mini_batches=1, num_epochs=0)
    result = update_policy(model, optimizer, data, none, with_options(**OPTIONS["importance"]), 1000)
    observed = {name for name in expected if name.startswith("importance_")} | {"entropy", "rollout_mismatch_kl"}
    assert result["entropy"] > 0
    assert {name: result[name] for name in observed} == pytest.approx({name: expected[name] for name in observed})
    assert {name: value for name, value in result.items() if name not in observed} == NO_STEP
    assert len(policies) == 1
    assert largest_difference(model, before) == 0
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5

    critic_optimizer = create_optimizer(critic, 0.5, weight_decay=0.1)
    of_value = update_value(critic, critic_optimizer, data, none, ValueLossSettings(), 1000)
    assert of_value == NO_STEP, "metrics without values must be absent, not 0"
    assert values == []
    assert largest_difference(critic, critic_before) == 0
    assert critic_optimizer.param_groups[0]["lr"] == 0.5


def test_leftover_gradients_are_ignored() -> None:
    models = [tiny.causal("llama") for _ in range(2)]
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in models:
        update_policy(model, sgd(model), experience(model), settings(), LOSS, 40)
    assert largest_difference(*models) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_mini_batches": 8}, "num_mini_batches 8"),
        ({"num_mini_batches": 0}, "num_mini_batches 0"),
        ({"num_epochs": -1}, "num_epochs -1"),
    ],
)
def test_settings_that_do_not_fit_the_experience_are_refused(changes: dict[str, int], words: str) -> None:
    model = tiny.causal("llama")
    with pytest.raises(InvalidRequest, match=words):
        update_policy(model, sgd(model), experience(model), settings(**changes), LOSS, 40)


def test_an_array_of_another_length_is_refused() -> None:
    model = tiny.causal("llama")
    data = dataclasses.replace(experience(model), advantages=np.zeros(3, np.float32))
    with pytest.raises(InvalidRequest, match="advantages"):
        update_policy(model, sgd(model), data, settings(), LOSS, 40)
