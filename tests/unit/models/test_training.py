"""PPO updates against an independent float64 implementation, and the promises on splits, ratios and failures."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quartet.errors import ComputationFailed, InvalidRequest, ModelError
from quartet.models import training
from quartet.models.loading import load_critic
from quartet.models.optimizer import create_optimizer, load_optimizer, save_optimizer
from quartet.models.scoring import response_log_probs
from quartet.models.training import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.random_streams import permutation
from quartet.types import Experience, OptimizationSettings, PolicyLossSettings, ValueLossSettings
from tests.unit.models import tiny

PROMPTS, RESPONSES = [3, 1, 6, 4, 2, 5, 3], [5, 8, 1, 6, 2, 7, 4]
LOSS = PolicyLossSettings(
    temperature=0.8,
    clip_low=0.1,
    clip_high=0.15,
    dual_clip=1.5,
    entropy_bonus=0.02,
    kl_loss="k3",
    kl_loss_coefficient=0.1,
)


def experience(model: Any, seed: int = 0) -> Experience:
    """Random advantages and returns on random sequences, with the model's own log-probs disturbed a little."""
    generator = np.random.default_rng(seed)
    batch, tokens = tiny.batch(PROMPTS, RESPONSES, seed), sum(RESPONSES)

    def noise(scale: float) -> Any:
        return (scale * generator.standard_normal(tokens)).astype(np.float32)

    log_probs = response_log_probs(model, batch, LOSS.temperature, 1000) if model is not None else noise(1)
    return Experience(
        run="r",
        step=3,
        policy_version=3,
        ids=tuple(map(str, range(len(PROMPTS)))),
        batch=batch,
        scores=np.zeros(len(PROMPTS), np.float32),
        log_probs=log_probs + noise(0.1),
        reference_log_probs=log_probs + noise(0.3),
        values=noise(1),
        advantages=noise(1),
        returns=noise(1),
        actor_mask=(generator.random(tokens) < 0.8).astype(np.float32),
    )


def settings(**changes: Any) -> OptimizationSettings:
    return OptimizationSettings(
        **{"epochs": 2, "mini_batches": 2, "learning_rate": 0.05, "max_grad_norm": 1.0, "seed": 5, **changes}
    )


def sgd(model: Any) -> torch.optim.Optimizer:
    """Plain gradient descent: weights then show the gradients themselves, which Adam's division would hide."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def largest_difference(a: Any, b: Any) -> float:
    return max(
        (x.double() - y.double()).abs().max().item() for x, y in zip(a.parameters(), b.parameters(), strict=True)
    )


class Straightforward:
    """The update as one would write it on a blackboard: float64, one sequence at a time, every formula spelt out."""

    def __init__(self, model: Any, data: Experience, chosen: OptimizationSettings) -> None:
        self.model = copy.deepcopy(model).double()
        self.data, self.chosen = data, chosen
        self.sequences = data.batch.sequences()
        bounds = np.cumsum([0, *RESPONSES])
        self.flat = [slice(bounds[i], bounds[i + 1]) for i in range(len(RESPONSES))]

    def of(self, name: str, row: int) -> torch.Tensor:
        return torch.from_numpy(getattr(self.data, name)[self.flat[row]].astype(np.float64))

    def groups(self, epoch: int) -> list[Any]:
        order = permutation(self.chosen.seed, self.data.step, epoch, len(self.sequences))
        return np.array_split(order, self.chosen.mini_batches) if self.chosen.mini_batches > 1 else [np.sort(order)]

    def distribution(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(self.sequences[row].astype(np.int64))
        first = PROMPTS[row]
        full = torch.log_softmax(self.model(input_ids=ids[None]).logits[0] / LOSS.temperature, -1)[first - 1 : -1]
        return full[torch.arange(len(ids) - first), ids[first:]], -(full.exp() * full).sum(-1)

    def descend(self, loss: torch.Tensor) -> float:
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        norm = float(torch.sqrt(sum((g**2).sum() for g in gradients)))  # type: ignore[arg-type]
        scale = min(1.0, self.chosen.max_grad_norm / norm)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= self.chosen.learning_rate * scale * gradient
        return norm

    def policy(self) -> dict[str, float]:
        with torch.no_grad():
            old = [self.distribution(row)[0] for row in range(len(self.sequences))]
        losses, norms, entropies, kls, clipped, tokens = [], [], [], 0.0, 0, 0
        for epoch in range(self.chosen.epochs):
            for group in self.groups(epoch):
                count = float(sum(self.of("actor_mask", row).sum() for row in group))
                surrogate = torch.zeros((), dtype=torch.float64)
                bonus, penalty = surrogate.clone(), surrogate.clone()
                for row in group:
                    log_probs, entropy = self.distribution(row)
                    mask, advantage = self.of("actor_mask", row), self.of("advantages", row)
                    ratio = torch.exp(log_probs - old[row])
                    objective = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)
                    capped = torch.where(advantage < 0, torch.maximum(objective, 1.5 * advantage), objective)
                    surrogate = surrogate - (capped * mask).sum() / count
                    bonus = bonus + (entropy * mask).sum() / count
                    behind = self.of("reference_log_probs", row) - log_probs
                    penalty = penalty + ((behind.exp() - 1 - behind) * mask).sum() / count
                    kls += ((ratio - 1 - ratio.log()) * mask).sum().item()
                    clipped += int(((capped != ratio * advantage) & (mask > 0)).sum())
                    entropies += entropy.tolist() if epoch == 0 else []
                tokens += int(count)
                losses.append(surrogate.item())
                norms.append(self.descend(surrogate - LOSS.entropy_bonus * bonus + LOSS.kl_loss_coefficient * penalty))
        drift = torch.cat(old) - torch.from_numpy(self.data.log_probs.astype(np.float64))
        return {
            "policy_loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "entropy": float(np.mean(entropies)),
            "approx_kl": kls / tokens,
            "clip_fraction": clipped / tokens,
            "rollout_mismatch_kl": float((drift.exp() - 1 - drift).mean()),
        }

    def value(self, clip: float) -> dict[str, float]:
        losses = []
        for epoch in range(self.chosen.epochs):
            for group in self.groups(epoch):
                count = sum(RESPONSES[row] for row in group)
                loss = torch.zeros((), dtype=torch.float64)
                for row in group:
                    ids = torch.from_numpy(self.sequences[row].astype(np.int64))
                    hidden = self.model.backbone(input_ids=ids[None]).last_hidden_state[0]
                    values = self.model.head(hidden)[PROMPTS[row] - 1 : -1, 0]
                    before, goal = self.of("values", row), self.of("returns", row)
                    near = before + (values - before).clamp(-clip, clip)
                    loss = loss + 0.5 * torch.maximum((values - goal) ** 2, (near - goal) ** 2).sum() / count
                losses.append(loss.item())
                self.descend(loss)
        return {"value_loss": float(np.mean(losses))}


@pytest.mark.parametrize("mini_batches", [1, 2, 3])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_policy_update_agrees_with_a_straightforward_one_in_float64(kind: str, mini_batches: int) -> None:
    model = tiny.causal(kind)
    data, chosen = experience(model), settings(mini_batches=mini_batches)
    plain = Straightforward(model, data, chosen)
    expected = plain.policy()
    before = copy.deepcopy(model)
    found = update_policy(model, sgd(model), data, chosen, LOSS, 40)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert 0 < found["clip_fraction"] < 1
    assert largest_difference(model, plain.model) < 1e-5
    assert largest_difference(model, before) > 1e-3
    assert found["optimizer_steps"] == 2 * mini_batches
    assert found["learning_rate"] == 0.05


@pytest.mark.parametrize("clip", [0.2, 50.0])
def test_a_value_update_agrees_with_a_straightforward_one_in_float64(clip: float) -> None:
    model = ValueModel.of_classifier(tiny.classifier("llama"))
    data, chosen = experience(None), settings(mini_batches=3)
    plain = Straightforward(model, data, chosen)
    expected = plain.value(clip)
    found = update_value(model, sgd(model), data, chosen, ValueLossSettings(clip), 40)
    assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-4)
    assert largest_difference(model, plain.model) < 1e-5
    assert (found["value_clip_fraction"] > 0) == (clip == 0.2)
    assert found["optimizer_steps"] == 6


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_the_size_of_micro_batches_changes_no_weights(mini_batches: int) -> None:
    policies, critics = [], []
    data = experience(tiny.causal("llama"))
    for max_tokens in (1, 33, 10_000):
        model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
        chosen = settings(mini_batches=mini_batches, learning_rate=1e-3)
        # An eps far above the rounding of the gradients: with 1e-8 Adam turns a gradient of 1e-9 into a whole step.
        update_policy(model, create_optimizer(model, 0.0, eps=1e-3), data, chosen, LOSS, max_tokens)
        update_value(critic, create_optimizer(critic, 0.0, eps=1e-3), data, chosen, ValueLossSettings(), max_tokens)
        policies.append(model)
        critics.append(critic)
    assert max(largest_difference(policies[0], other) for other in policies[1:]) < 1e-5
    assert max(largest_difference(critics[0], other) for other in critics[1:]) < 1e-5


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_the_ratio_starts_at_exactly_one(mini_batches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    deviations: list[float] = []
    original = training.policy_loss

    def watching(log_probs: torch.Tensor, old: torch.Tensor, *rest: Any) -> Any:
        deviations.append(float((log_probs.detach() - old).exp().sub(1).abs().max()))
        return original(log_probs, old, *rest)

    monkeypatch.setattr(training, "policy_loss", watching)
    model = tiny.causal("llama")
    data = experience(model)
    update_policy(model, sgd(model), data, settings(mini_batches=mini_batches), LOSS, 1000)
    assert deviations[0] == 0.0
    assert min(deviations[1:]) > 1e-3


def test_later_mini_batches_of_the_first_epoch_compare_with_the_weights_before_it() -> None:
    model = tiny.causal("llama")
    data = experience(model)
    frozen = settings(mini_batches=3, epochs=1, learning_rate=0.0)
    assert update_policy(model, sgd(model), data, frozen, LOSS, 40)["approx_kl"] == pytest.approx(0.0, abs=1e-9)
    moving = settings(mini_batches=3, epochs=1)
    assert update_policy(model, sgd(model), data, moving, LOSS, 40)["approx_kl"] > 1e-4


def test_the_same_update_gives_the_same_bits() -> None:
    found = []
    for _ in range(2):
        model = tiny.causal("llama")
        optimizer = create_optimizer(model, 0.0, weight_decay=0.01)
        metrics = update_policy(model, optimizer, experience(model), settings(learning_rate=1e-3), LOSS, 40)
        found.append((metrics, [parameter.detach().numpy().tobytes() for parameter in model.parameters()]))
    assert found[0] == found[1]


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
        found = update_policy(model, sgd(model), changed, settings(mini_batches=3, epochs=1), LOSS, 40)
        assert found["optimizer_steps"] == 2
        assert all(np.isfinite(value) for value in found.values())
    nothing = dataclasses.replace(data, actor_mask=np.zeros_like(data.actor_mask))
    before = copy.deepcopy(model)
    found = update_policy(model, sgd(model), nothing, settings(), LOSS, 40)
    assert (found["optimizer_steps"], found["policy_loss"], found["grad_norm"]) == (0, 0, 0)
    assert np.isfinite(found["rollout_mismatch_kl"])
    assert largest_difference(model, before) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stop_the_update_before_any_weight_is_touched(bad: float) -> None:
    model, critic = tiny.causal("llama"), ValueModel.of_classifier(tiny.classifier("llama"))
    data = experience(model)
    data.advantages[:] = bad
    data.returns[3] = bad
    before, critic_before = copy.deepcopy(model), copy.deepcopy(critic)
    optimizer = create_optimizer(model, 0.1, weight_decay=0.1)
    with pytest.raises(ComputationFailed, match="policy update"):
        update_policy(model, optimizer, data, settings(), LOSS, 1000)
    with pytest.raises(ComputationFailed, match="value update"):
        update_value(critic, sgd(critic), data, settings(mini_batches=1), ValueLossSettings(), 1000)
    assert largest_difference(model, before) == 0
    assert largest_difference(critic, critic_before) == 0
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_someone_left_behind_do_not_count() -> None:
    models = [tiny.causal("llama") for _ in range(2)]
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in models:
        update_policy(model, sgd(model), experience(model), settings(), LOSS, 40)
    assert largest_difference(*models) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"mini_batches": 8}, "mini_batches 8"), ({"mini_batches": 0}, "mini_batches 0"), ({"epochs": 0}, "epochs")],
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


def test_only_matrices_decay() -> None:
    model = tiny.causal("gpt2")
    optimizer = create_optimizer(model, 0.1, betas=(0.8, 0.9), weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
    assert all(parameter.ndim > 1 for parameter in optimizer.param_groups[0]["params"])
    assert all(parameter.ndim <= 1 for parameter in optimizer.param_groups[1]["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_training_goes_on_from_a_saved_optimizer_bit_for_bit(tmp_path: Path) -> None:
    data = experience(None)
    tiny.saved(tiny.classifier("llama"), tmp_path / "m")
    chosen = settings(learning_rate=1e-2)

    def step(critic: ValueModel, optimizer: torch.optim.Optimizer) -> None:
        update_value(critic, optimizer, data, chosen, ValueLossSettings(), 40)

    critic = load_critic(tmp_path / "m")
    optimizer = create_optimizer(critic, 0.0, weight_decay=0.1)
    step(critic, optimizer)
    critic.save(tmp_path / "critic")
    for name in ("optimizer.safetensors", "again.safetensors"):
        save_optimizer(optimizer, tmp_path / name)
    assert (tmp_path / "optimizer.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    step(critic, optimizer)

    resumed = load_critic(tmp_path / "critic")
    other = create_optimizer(resumed, 0.0, weight_decay=0.1)
    load_optimizer(other, tmp_path / "optimizer.safetensors")
    assert {float(entry["step"]) for entry in other.state.values()} == {4.0}
    assert other.param_groups[0]["lr"] == 1e-2
    step(resumed, other)
    assert largest_difference(critic, resumed) == 0
    for one, two in zip(critic.parameters(), resumed.parameters(), strict=True):
        assert optimizer.state[one].keys() == other.state[two].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, other.state[two][name]) for name, value in optimizer.state[one].items())


def test_an_optimizer_that_has_not_stepped_is_saved_too(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    save_optimizer(create_optimizer(model, 0.5), tmp_path / "o")
    fresh = create_optimizer(model, 0.1)
    load_optimizer(fresh, tmp_path / "o")
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.5


def test_an_optimizer_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    small, large = tiny.causal("llama"), tiny.causal("llama", intermediate_size=56)
    optimizer = create_optimizer(large, 0.1)
    update_policy(large, optimizer, experience(large), settings(), LOSS, 40)
    save_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ModelError, match="shape"):
        load_optimizer(create_optimizer(small, 0.1), tmp_path / "o")
    with pytest.raises(ModelError, match="groups"):
        load_optimizer(create_optimizer(tiny.causal("gpt2"), 0.1), tmp_path / "o")
    (tmp_path / "o").write_bytes((tmp_path / "o").read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_optimizer(optimizer, tmp_path / "o")
    with pytest.raises(ModelError, match="cannot be read"):
        load_optimizer(optimizer, tmp_path / "nowhere")
