"""Options of adapters: rsLoRA, dropout and LoRA+ have their effect, as in peft, and dropout depends on the tokens only."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from quartet.config.models import LoraConfig
from quartet.contract.update import ValueLossSettings
from quartet.errors import ModelError
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.lora_dropout import TokenDropout, dropped_inputs, masks_of, prefix_hashes
from quartet.models.forward.scoring import response_log_probs
from quartet.models.training.activation_checkpointing import activation_checkpointing
from quartet.models.training.optimizer import create_optimizer, set_learning_rate
from quartet.models.training.update_memory import measure_policy
from quartet.models.training.updates import update_policy, update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.host_tensors import adapter_settings
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.lora import add_adapter
from tests.unit.models import tiny, updates
from tests.unit.models.adapters import ALPHA, BATCH, IDS, RANK, adapted, learn, same, snapshot

RATE = 0.25


def randomized(kind: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return a tiny model with an adapter whose B is not 0."""
    model, adapter = adapted(kind, **changes)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return model, adapter


def update(model: Any, step: int = 1, max_tokens: int = 200, checkpointing: bool = False, **loss: Any) -> Any:
    """Apply a policy update of two epochs and mini-batches. Return its metrics."""
    optimizer, data = create_optimizer(model, 1e-3, eps=1e-5), dataclasses.replace(updates.experience(model), step=step)
    settings = updates.settings(num_epochs=2, num_mini_batches=2, learning_rate=1e-3)
    with activation_checkpointing(model, checkpointing):
        return update_policy(model, optimizer, data, settings, updates.with_options(**loss), max_tokens)


def largest_difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return updates.largest_difference(a, b)


def test_rslora_multiplies_by_alpha_over_the_root_of_the_rank_as_in_peft(tmp_path: Path) -> None:
    model, adapter = randomized(rslora=True)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0))
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = layer.base_layer(x) + ALPHA / math.sqrt(RANK) * x @ delta.T
    assert torch.allclose(layer(x), expected, atol=1e-6)
    settings = adapter_settings(adapter)
    assert settings is not None
    # Engines compute alpha / rank.
    assert settings.alpha / settings.rank == pytest.approx(ALPHA / math.sqrt(RANK), rel=1e-12)
    tmp_path.joinpath("a").mkdir()
    adapter.snapshot()(tmp_path / "a")
    theirs = peft.PeftModel.from_pretrained(tiny.causal("llama"), str(tmp_path / "a")).eval()
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    plain = peft.LoraConfig.from_pretrained(str(tmp_path / "a"))
    assert isinstance(plain, peft.LoraConfig)
    assert (plain.use_rslora, plain.lora_alpha) == (True, ALPHA)


def test_a_merged_rslora_adapter_computes_what_the_adapter_does(tmp_path: Path) -> None:
    model, adapter = randomized(rslora=True)
    adapter.snapshot_merged()(tmp_path / "m")
    merged = load_causal_lm(tmp_path / "m")
    assert torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-4)


def test_the_adapter_config_says_the_dropout_and_peft_reads_it(tmp_path: Path) -> None:
    model, adapter = randomized(dropout=RATE)
    tmp_path.joinpath("a").mkdir()
    adapter.snapshot()(tmp_path / "a")
    theirs: Any = peft.PeftModel.from_pretrained(tiny.causal("llama"), str(tmp_path / "a"))
    assert theirs.peft_config["default"].lora_dropout == RATE
    assert torch.equal(theirs.eval()(IDS).logits, model(IDS).logits)


def test_dropout_changes_updates_and_nothing_else() -> None:
    (dropped, _), (plain, _) = randomized(dropout=0.5), randomized()
    before = response_log_probs(plain, BATCH, 0.8, 64)
    assert response_log_probs(dropped, BATCH, 0.8, 64).tobytes() == before.tobytes()
    update(dropped), update(plain)
    assert largest_difference(dropped, plain) > 1e-4
    assert torch.equal(dropped(IDS).logits, dropped(IDS).logits)


@pytest.mark.parametrize("old", ["trainer", "rollout"])
def test_old_log_probs_and_observations_are_without_dropout(old: str) -> None:
    dropped = update(randomized(dropout=0.5)[0], old_log_probs=old)
    plain = update(randomized()[0], old_log_probs="trainer")
    for name in ("entropy", "rollout_mismatch_kl"):
        assert dropped[name] == pytest.approx(plain[name], rel=1e-6)
    assert dropped["approx_kl"] > 3 * plain["approx_kl"]


@pytest.mark.parametrize("change", [{}, {"checkpointing": True}])
def test_an_update_with_dropout_repeats_to_the_bit(change: dict[str, Any]) -> None:
    models = [randomized(dropout=RATE)[0] for _ in range(2)]
    torch.manual_seed(1)
    first = update(models[0])
    torch.manual_seed(2)
    assert update(models[1], **change) == first
    assert same(snapshot(models[0]), snapshot(models[1]))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "zamba2"])
def test_masks_do_not_depend_on_micro_batches(kind: str) -> None:
    one, many = (randomized(kind, dropout=RATE)[0] for _ in range(2))
    update(one), update(many, max_tokens=12)
    assert largest_difference(one, many) < 1e-5
    other = randomized(kind, dropout=RATE)[0]
    update(other, step=2)
    assert largest_difference(one, other) > 1e-4


def test_the_value_model_has_dropout_in_updates() -> None:
    results = []
    for rate, tokens in ((RATE, 200), (RATE, 12), (0.0, 200)):
        model = ValueModel.of_causal_lm(tiny.causal("llama"))
        add_adapter(model.backbone, "base", LoraConfig(rank=RANK, alpha=ALPHA, dropout=rate), 1)
        data, optimizer = updates.experience(tiny.causal("llama")), create_optimizer(model, 1e-3, eps=1e-5)
        for _ in range(2):
            update_value(model, optimizer, data, updates.settings(), ValueLossSettings(0.2), tokens)
        results.append(model)
    effect = largest_difference(results[0], results[2])
    assert largest_difference(results[0], results[1]) < 0.05 * effect
    assert effect > 1e-3


def test_a_layer_multiplies_the_kept_inputs_by_the_inverse_of_their_share_as_peft_does() -> None:
    model, _ = randomized(dropout=RATE)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    masks, micro_batch = masks_of(model), build_micro_batch(BATCH, range(3), "cpu", packed=True)
    assert masks is not None
    x = torch.randn(1, micro_batch.input_ids.numel(), layer.in_features, generator=torch.Generator().manual_seed(0))
    kept = ~dropped_inputs(
        prefix_hashes(micro_batch.input_ids, micro_batch.packing),
        layer.in_features,
        RATE,
        ("k", "model.layers.0.self_attn.q_proj"),
    )
    with masks.of_update(("k",), micro_batch):
        result = layer(x)
    # Torch's dropout, which peft uses: x kept / (1 - p).
    scaled = x * kept / (1 - RATE)
    delta = layer.lora_B["default"](layer.lora_A["default"](scaled)) * ALPHA / RANK
    assert torch.allclose(result, layer.base_layer(x) + delta, atol=1e-6)
    assert not torch.allclose(result, layer(x), atol=1e-3)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_inputs_are_dropped_with_the_given_probability_and_independently(rate: float) -> None:
    prefixes = prefix_hashes(torch.arange(2000).view(4, 500) % 7, None)
    assert len(set(prefixes.tolist())) == 2000
    dropped = dropped_inputs(prefixes, 300, rate, ("k", "a"))
    deviation = math.sqrt(rate * (1 - rate))
    assert dropped.float().mean().item() == pytest.approx(rate, abs=5 * deviation / math.sqrt(dropped.numel()))
    # Each row and column by itself, and neighbours among each other.
    for dim, count in ((0, 2000), (1, 300)):
        means = dropped.float().mean(dim)
        assert (means - rate).abs().max() < 5.5 * deviation / math.sqrt(count)
    centered = (dropped.float() - rate) / deviation
    for first, second in ((centered[1:], centered[:-1]), (centered[:, 1:], centered[:, :-1])):
        assert abs((first * second).mean().item()) < 5 / math.sqrt(first.numel())
    for key in (("k", "b"), ("l", "a")):
        other = (dropped_inputs(prefixes, 300, rate, key).float() - rate) / deviation
        assert abs((centered * other).mean().item()) < 5 / math.sqrt(centered.numel())


def test_a_rank_with_a_part_of_the_features_has_their_masks() -> None:
    prefixes = prefix_hashes(torch.tensor([[1, 2, 3]]), None)
    whole = dropped_inputs(prefixes, 10, 0.5, ("k",))
    assert torch.equal(dropped_inputs(prefixes, 6, 0.5, ("k",), 4), whole[:, 4:])


def test_packed_tokens_have_the_hashes_of_padded_ones() -> None:
    batch = tiny.batch([3, 3, 2], [4, 2, 5])
    batch.token_ids[batch.lengths[0] :][:3] = batch.token_ids[:3]
    packed, padded = (build_micro_batch(batch, [0, 1, 2], "cpu", packed=each) for each in (True, False))
    assert packed.input_ids.numel() == padded.predicts.shape[0] * 0 + int(batch.lengths.sum()) - 3 - 3
    ours = prefix_hashes(packed.input_ids, packed.packing)
    theirs = prefix_hashes(padded.input_ids, None)
    assert set(ours.tolist()) <= set(theirs.tolist())
    assert torch.equal(ours[packed.predicts], theirs[padded.predicts.flatten()])


def test_rows_that_are_no_tokens_are_refused() -> None:
    model, _ = randomized(dropout=RATE)
    masks, micro_batch = masks_of(model), build_micro_batch(BATCH, range(3), "cpu", packed=True)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert masks is not None
    with masks.of_update(("k",), micro_batch), pytest.raises(ModelError, match="q_proj gets 2 rows for"):
        layer(torch.zeros(2, layer.in_features))


def test_dropout_of_experts_is_refused_and_an_adapter_without_it_has_no_layer_for_it() -> None:
    with pytest.raises(ModelError, match=r"experts.*no inputs to drop; set lora.target_modules"):
        adapted("mixtral", dropout=RATE)
    model, _ = adapted("llama")
    assert not any(isinstance(module, TokenDropout) for module in model.modules())


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_lora_plus_steps_as_peft_s_optimizer_does(ratio: float) -> None:
    (ours, _), (theirs, adapter) = adapted("llama"), adapted("llama")
    optimizer = create_optimizer(ours, 1e-3, (0.9, 0.95), lora_ratio=ratio)
    reference: Any = create_loraplus_optimizer(
        adapter._peft, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=ratio, betas=(0.9, 0.95), fused=True
    )
    for number in range(3):
        for model, stepping in ((ours, optimizer), (theirs, reference)):
            model(IDS + number).logits.square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    assert same(snapshot(ours), snapshot(theirs))
    set_learning_rate(optimizer, 5e-4)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == sorted({5e-4, 5e-4 * ratio})


def test_the_ratio_of_lora_plus_has_an_effect_in_updates() -> None:
    plain, plus = adapted("llama")[0], adapted("llama")[0]
    learn(plain, optimizer=create_optimizer(plain, 1e-2))
    learn(plus, optimizer=create_optimizer(plus, 1e-2, lora_ratio=4.0))
    moved = [{name: value for name, value in snapshot(model).items() if ".lora_B." in name} for model in (plain, plus)]
    norms = [sum(float(value.norm()) for value in each.values()) for each in moved]
    assert norms[1] == pytest.approx(4 * norms[0], rel=0.5)
    assert np.isfinite(norms).all()


def test_the_memory_of_dropout_is_measured() -> None:
    """The measurement may be the first pass of a model, whose trials have other tokens."""
    per_token = [measure_policy(randomized(dropout=rate)[0], 64, "none").token_bytes(False) for rate in (0.0, RATE)]
    assert per_token[1] > 1.05 * per_token[0]
