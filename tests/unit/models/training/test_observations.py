"""Updates on responses with observations: their tokens have no loss, no KL, no entropy and no gradient."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from quartet.contract.update import Experience, ValueLossSettings
from quartet.errors import InvalidRequest
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
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
)

MASK = np.concatenate([np.arange(length) % 4 != 2 for length in RESPONSES])
"""The policy's own tokens: turns of two or three tokens, and an observation of one token between them."""
FLAT = ("log_probs", "reference_log_probs", "values", "advantages", "returns", "actor_mask")


def with_observations(data: Experience) -> Experience:
    """Return the experience with the tokens outside MASK as observations, as the orchestrator seals it."""
    zeroed = {name: np.where(MASK, getattr(data, name), np.float32(0)) for name in FLAT}
    return dataclasses.replace(data, **zeroed, response_mask=MASK)


def with_noise(data: Experience) -> Experience:
    """Return experience whose numbers at observation tokens are arbitrary, except in the mask of the policy loss."""
    noise = np.random.default_rng(11).normal(0, 50, len(MASK)).astype(np.float32)
    return dataclasses.replace(
        data, **{name: np.where(MASK, getattr(data, name), noise) for name in FLAT if name != "actor_mask"}
    )


@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_a_policy_update_agrees_with_the_masked_formulas(option: str | None) -> None:
    model, loss = tiny.causal("llama"), with_options(**OPTIONS[option]) if option else LOSS
    data, optimization = with_observations(experience(model)), settings(num_mini_batches=3)
    reference = ReferenceUpdate(model, data, optimization, loss)
    with torch.no_grad():
        entropies = torch.cat([reference.distribution(row)[1] for row in range(len(RESPONSES))])
        old = torch.cat([reference.distribution(row)[0] for row in range(len(RESPONSES))]).numpy()
    expected = reference.policy()
    result = update_policy(model, sgd(model), data, optimization, loss, 40)
    assert largest_difference(model, reference.model) < 1e-5
    for name in ("policy_loss", "clip_fraction", "approx_kl", "grad_norm"):
        assert result[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)
    assert result["entropy"] == pytest.approx(float(entropies[MASK].mean()), rel=1e-4)
    difference = (old - data.log_probs.astype(np.float64))[MASK]
    assert result["rollout_mismatch_kl"] == pytest.approx(
        np.mean(np.expm1(difference) - difference), rel=1e-3, abs=1e-5
    )


@pytest.mark.parametrize("num_mini_batches", [1, 3])
def test_several_turns_give_the_policy_of_one_turn_with_a_mask(num_mini_batches: int) -> None:
    """The same tokens as one turn, with the observations outside the policy loss as truncated responses are."""
    turns, one_turn = tiny.causal("llama"), tiny.causal("llama")
    data, optimization = with_observations(experience(turns)), settings(num_mini_batches=num_mini_batches)
    masked = dataclasses.replace(data, response_mask=np.zeros(0, np.bool_))
    results = [
        update_policy(model, sgd(model), each, optimization, LOSS, 40)
        for model, each in ((turns, data), (one_turn, masked))
    ]
    assert largest_difference(turns, one_turn) == 0
    for name in ("policy_loss", "clip_fraction", "approx_kl", "grad_norm", "optimizer_steps"):
        assert results[0][name] == results[1][name]


def test_a_value_update_agrees_with_the_masked_formula() -> None:
    clip, model = 0.2, ValueModel.of_classifier(tiny.classifier("llama"))
    data, optimization = with_observations(experience(None)), settings(num_mini_batches=3)
    reference, losses = ReferenceUpdate(model, data, optimization), list[float]()
    bounds = np.cumsum([0, *RESPONSES])
    for group in (group for epoch in range(optimization.num_epochs) for group in reference.groups(epoch)):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row in group:
            own = torch.from_numpy(MASK[bounds[row] : bounds[row + 1]])
            ids = torch.from_numpy(reference.sequences[row].astype(np.int64))
            hidden = reference.model.backbone(input_ids=ids[None]).last_hidden_state[0]
            values = reference.model.head(hidden)[PROMPTS[row] - 1 : -1, 0][own]
            old, target = reference.of("values", row)[own], reference.of("returns", row)[own]
            near = values.clamp(old - clip, old + clip)
            total = total + 0.5 * torch.maximum((values - target) ** 2, (near - target) ** 2).sum()
            count += int(own.sum())
        losses.append((total / count).item())
        reference.descend(total / count)
    result = update_value(model, sgd(model), data, optimization, ValueLossSettings(clip), 40)
    assert result["value_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert largest_difference(model, reference.model) < 1e-5


def test_numbers_at_observations_change_nothing() -> None:
    models, critics, results = [], [], []
    for data in (with_observations(experience(tiny.causal("llama"))), None):
        data = data or with_noise(with_observations(experience(tiny.causal("llama"))))
        model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
        metrics = update_policy(model, sgd(model), data, settings(), with_options(**OPTIONS["all"]), 40)
        metrics |= update_value(critic, sgd(critic), data, settings(), ValueLossSettings(), 40)
        models.append(model)
        critics.append(critic)
        results.append(metrics)
    assert largest_difference(*models) == largest_difference(*critics) == 0
    assert results[0] == results[1]


@pytest.mark.parametrize("max_tokens", [1, 33, 10_000])
def test_the_micro_batch_size_does_not_change_the_weights(max_tokens: int) -> None:
    policies, critics = [], []
    data = with_observations(experience(tiny.causal("llama")))
    for limit in (40, max_tokens):
        model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
        update_policy(model, sgd(model), data, settings(), LOSS, limit)
        update_value(critic, sgd(critic), data, settings(), ValueLossSettings(), limit)
        policies.append(model)
        critics.append(critic)
    assert largest_difference(*policies) < 1e-5
    assert largest_difference(*critics) < 1e-5


@pytest.mark.parametrize(
    ("mask", "problem"),
    [(MASK[:-1], "response_mask"), (~MASK, "actor_mask: expected 0 at the tokens of observations")],
)
def test_a_mask_that_does_not_fit_is_refused(mask: np.ndarray, problem: str) -> None:
    model = tiny.causal("llama")
    data = dataclasses.replace(with_observations(experience(model)), response_mask=mask)
    with pytest.raises(InvalidRequest, match=problem):
        update_policy(model, sgd(model), data, settings(), LOSS, 40)
