"""Frozen parameters: patterns select them, updates do not change them, and invalid patterns are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.contract.update import ValueLossSettings
from quartet.errors import ModelError
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_value
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import freeze_parameters
from tests.unit.models import tiny
from tests.unit.models.adapters import SETTINGS, experience, learn


def frozen(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def moved(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "patterns"),
    [
        ("llama", ("*embed_tokens*", "*.layers.0.*")),
        ("gpt2", ("transformer.wpe.weight", "*.h.1.mlp.*")),
        ("gpt_neox", ("gpt_neox.*",)),
        ("qwen2", ("*.bias",)),
    ],
)
def test_an_update_changes_all_parameters_except_frozen_ones(kind: str, patterns: tuple[str, ...]) -> None:
    model = tiny.causal(kind)
    names, before = {name for name, _ in model.named_parameters()}, weights(model)
    freeze_parameters(model, patterns)
    chosen = {
        "llama": {n for n in names if "embed_tokens" in n or ".layers.0." in n},
        "gpt2": {n for n in names if n == "transformer.wpe.weight" or ".h.1.mlp." in n},
        "gpt_neox": names - {"lm_head.weight"},
        "qwen2": {n for n in names if n.endswith(".bias")},
    }[kind]
    assert frozen(model) == chosen
    # With weight decay, which could change parameters without a gradient.
    learn(model, steps=2)
    assert moved(model, before) == names - chosen


@pytest.mark.parametrize("pattern", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_frozen_under_either_name(pattern: str) -> None:
    model = tiny.causal("qwen2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.lm_head.weight.detach().clone()
    freeze_parameters(model, (pattern,))
    learn(model)
    assert torch.equal(model.lm_head.weight, before)
    untied: Any = tiny.causal("qwen2", tie_word_embeddings=False)
    freeze_parameters(untied, ("lm_head.weight",))
    assert untied.model.embed_tokens.weight.requires_grad


def test_a_critic_can_train_only_its_head() -> None:
    critic = ValueModel.of_classifier(tiny.classifier("llama"))
    before = weights(critic)
    freeze_parameters(critic, ("backbone.*",))
    optimizer = create_optimizer(critic, 1e-2, weight_decay=0.1)
    update_value(critic, optimizer, experience(), SETTINGS, ValueLossSettings(), 64)
    assert moved(critic, before) == {"head.weight"}


def test_without_patterns_nothing_is_frozen() -> None:
    model = tiny.causal("llama")
    freeze_parameters(model, ())
    assert frozen(model) == set()


def test_a_pattern_without_a_match_is_refused_with_examples_of_names() -> None:
    with pytest.raises(
        ModelError, match=r"freeze 'wte\*': matches no parameter of LlamaForCausalLM; .*model.embed_tokens.weight,"
    ):
        freeze_parameters(tiny.causal("llama"), ("*norm*", "wte*"))


@pytest.mark.parametrize("patterns", [("*",), ("model.*", "lm_head.*")])
def test_freezing_every_parameter_is_refused(patterns: tuple[str, ...]) -> None:
    with pytest.raises(
        ModelError, match=r"nothing can be trained; keep some trainable, for example model.embed_tokens.weight,"
    ):
        freeze_parameters(tiny.causal("llama"), patterns)
