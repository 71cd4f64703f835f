"""Parameters and saved bytes from a config.json, compared with modules of transformers and with measured passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.contract.trajectory import TokenBatch
from quartet.errors import ConfigError
from quartet.model_files.shape import FAMILIES, ModelShape, model_shape
from quartet.models.forward.batching import build_micro_batch
from quartet.models.forward.log_probs import forward_log_probs
from quartet.models.forward.packing import supports_packing
from quartet.models.training.update_memory import saved_bytes
from quartet.models.value_head import ValueModel
from quartet.models.weights.lora import add_adapter
from quartet.models.workers.tensor_parallel import STYLES

HIDDEN, HEAD, VOCABULARY, EXAMPLES = 64, 24, 997, Path("examples/plan/models")
ROWS, LENGTH, PROMPT = 8, 40, 8
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"head_dim": HEAD} for kind in ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text")},
    "gpt2": {"n_inner": 160},
    "mixtral": {"head_dim": HEAD, "num_local_experts": 4},
    "qwen2_moe": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 72},
    "qwen3_moe": {
        "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": HEAD, "mlp_only_layers": [1]
    },
}  # fmt: skip
VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True, "head_dim": 20}),
    ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("gemma", {"tie_word_embeddings": False}),
]
"""Further settings that change the number of parameters."""


def config(kind: str, layers: int = 3, **changes: Any) -> Any:
    """Return a config with different sizes for everything. Keys with the default of the type are in config.json or not."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": 1,
    }
    if kind not in ("gpt2", "gpt_neox"):
        common["num_key_value_heads"] = 2
    if kind != "gpt2":
        common["intermediate_size"] = 160
    return transformers.AutoConfig.for_model(kind, **{**common, **OWN.get(kind, {}), **changes})


def shape_of(config_: Any) -> ModelShape:
    return model_shape(json.loads(config_.to_json_string(use_diff=True)), "model")


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in FAMILIES), *VARIANTS])
def test_the_parameters_of_every_known_type_equal_those_of_its_modules(kind: str, changes: dict[str, Any]) -> None:
    config_ = config(kind, **changes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_)
    shape = shape_of(config_)
    assert shape.parameters == count(model)
    assert shape.value_parameters == count(model.base_model) + HIDDEN + 1


def test_the_types_that_can_be_tensor_parallel_have_a_plan_with_supported_styles() -> None:
    plans = {kind: type(config(kind)).base_model_tp_plan or {} for kind in FAMILIES}
    with_plan = {kind for kind, plan in plans.items() if plan and set(plan.values()) <= STYLES.keys()}
    assert {kind for kind, family in FAMILIES.items() if family.sliceable} == with_plan


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_parameters_of_adapters_equal_those_of_the_trained_modules(kind: str) -> None:
    config_ = config(kind)
    model = transformers.AutoModelForCausalLM.from_config(config_)
    add_adapter(model, "base", LoraConfig(rank=4, alpha=8.0))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape_of(config_).lora_parameters(4) == trained


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("llama-3.1-70b", 70_553_706_496)],
)
def test_the_example_models_have_their_published_sizes(name: str, parameters: int) -> None:
    description = json.loads((EXAMPLES / name / "config.json").read_text())
    assert model_shape(description, name).parameters == parameters


def saved_per_token(kind: str, layers: int, dtype: torch.dtype, value: bool) -> float:
    """Return the measured bytes that a forward pass of a random model saves, per token."""
    model = transformers.AutoModelForCausalLM.from_config(config(kind, layers), dtype=dtype).eval()
    lengths = np.full(ROWS, LENGTH + 1 - PROMPT, np.int32)
    token_ids = np.arange(ROWS * (LENGTH + 1), dtype=np.int32) % VOCABULARY
    batch = TokenBatch(token_ids, np.full(ROWS, PROMPT, np.int32), lengths)
    micro_batch = build_micro_batch(batch, range(ROWS), "cpu", supports_packing(model))
    if value:
        values = ValueModel.of_causal_lm(model)
        return saved_bytes(values, lambda: values(micro_batch.input_ids, micro_batch.predicts, micro_batch.packing)) / (
            ROWS * LENGTH
        )
    return saved_bytes(model, lambda: forward_log_probs(model, micro_batch, 1.0, "report")) / (ROWS * LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if not kind.endswith("_moe")])
def test_the_saved_bytes_of_a_layer_match_measured_ones(kind: str, dtype: torch.dtype) -> None:
    few, many = (saved_per_token(kind, layers, dtype, value=False) for layers in (2, 3))
    shape = shape_of(config(kind))
    assert shape.saved_layer_bytes(dtype.itemsize, LENGTH) == pytest.approx(many - few, rel=0.02)


def test_the_saved_bytes_outside_the_layers_match_measured_ones() -> None:
    few, many = (saved_per_token("llama", layers, torch.float32, value=True) for layers in (2, 3))
    assert shape_of(config("llama")).saved_model_bytes(4) == pytest.approx(few - 2 * (many - few), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba', which the planner cannot count; expected one of llama, "),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size is missing; expected a whole number"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0; expected a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 4"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
    ],
)
def test_a_config_that_cannot_be_counted_is_an_error(changes: dict[str, Any], message: str) -> None:
    description = {**config("qwen2").to_dict(), **changes}
    with pytest.raises(ConfigError, match=r"^actor.model m: config.json") as raised:
        model_shape(description, "actor.model m")
    assert message in str(raised.value)
