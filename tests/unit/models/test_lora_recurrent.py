"""LoRA on the projections of recurrent layers, which transformers and peft treat in their own ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quartet.config.models import LoraConfig
from quartet.errors import ModelError
from quartet.models.weights.lora import add_adapter, matrices_without_adapter
from tests.architectures import models
from tests.unit.models.adapters import ALPHA, RANK, learn


def adapted(kind: str, *target_modules: str) -> Any:
    model = models.causal_lm(kind)
    add_adapter(model, "base", LoraConfig(rank=RANK, alpha=ALPHA, target_modules=target_modules))
    return model


def without_adapter(model: Any) -> set[str]:
    return {name.removesuffix(".weight").rpartition(".")[2] for name in matrices_without_adapter(model)}


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        # The layer multiplies with the matrix dt_proj itself, and an adapter would have no effect.
        ("mamba", {"A_log", "conv1d", "dt_proj"}),
        ("mamba2", {"conv1d"}),
        ("qwen3_next", {"conv1d", "gate"}),
        # Matrices for each head, which are no experts.
        ("recurrent_gemma", {"conv_1d", "input_gate_weight", "recurrent_gate_weight"}),
        ("rwkv", {"time_mix_key", "time_mix_receptance", "time_mix_value"}),
    ],
)
def test_every_projection_of_a_recurrent_layer_has_an_adapter_that_an_update_trains(
    kind: str, left_out: set[str]
) -> None:
    model = adapted(kind)
    assert without_adapter(model) == left_out
    learn(model)
    matrices = {name: value for name, value in model.named_parameters() if ".lora_B." in name}
    assert len(matrices) >= 4
    assert [name for name, value in matrices.items() if not value.any()] == []


def test_matrices_that_layers_share_have_no_adapter() -> None:
    model = adapted("zamba")
    assert {"q_proj", "down_proj"} <= without_adapter(model)
    assert not {"in_proj", "out_proj", "linear"} & without_adapter(model)


def test_a_target_without_an_effect_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'dt_proj': backbone\.layers\.0\.mixer\.dt_proj is read by its parent"):
        adapted("mamba", "dt_proj")


def test_a_chosen_output_projection_of_mamba_gets_an_adapter() -> None:
    model = adapted("falcon_mamba", "out_proj")
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert names == {"out_proj"}
    assert all(torch.isfinite(value).all() for value in model.parameters())
