"""Models that tensor parallelism refuses. For what it computes see test_parallel_groups.py."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.errors import ModelError
from quartet.models.workers.tensor_group import TensorGroup
from quartet.models.workers.tensor_parallel import check_slices, slice_layers
from tests.unit.models import tiny


def group_of(size: int) -> TensorGroup:
    """Return a group as the first rank sees it, which cannot communicate."""
    group = TensorGroup.__new__(TensorGroup)
    group.rank, group.size = 0, size
    return group


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("gpt2", 2, "tensor 2: a gpt2 model has no tensor parallel plan in transformers; set tensor 1"),
        (
            "mixtral",
            2,
            "the plan of a mixtral model has the style moe_tp_experts, which is not supported; set tensor 1",
        ),
        ("llama", 3, "tensor 3: does not divide num_attention_heads 4 of the llama model; set a divisor of 4"),
        ("llama", 4, "tensor 4: does not divide num_key_value_heads 2 of the llama model; set a divisor of 2"),
    ],
)
def test_models_that_cannot_be_sliced_are_refused(kind: str, size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        slice_layers(tiny.causal(kind), group_of(size))


def test_a_model_whose_slices_compute_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = group_of(2)
    # Without the sum over the ranks, the outputs are those of one slice.
    monkeypatch.setattr(group, "sum", lambda value: value)
    monkeypatch.setattr(group, "join", lambda value, size: value)
    model = tiny.causal("llama")
    expected = slice_layers(model, group).expected
    with pytest.raises(
        ModelError, match=r"tensor 2: the llama model computes other hidden states with the plan of transformers, by .*"
    ):
        check_slices(model, group, expected)


def test_features_that_are_too_few_are_refused() -> None:
    model = tiny.causal("llama", intermediate_size=1)
    with pytest.raises(ModelError, match=r"layer model.layers.0.mlp.gate_proj: 1 features are too few to slice"):
        slice_layers(model, group_of(2))
