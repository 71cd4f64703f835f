"""A part of `make architectures`, and the completeness of the rule for models that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.architectures import comparison, models
from tests.every_case import every_case

PAGE = Path(__file__).parents[2] / "docs/reference/architectures.md"


# Packed experts with a router that is a linear layer; layers with recurrent states without attention; an index of keys. Slow: a
# plain model, a mask of the model's own, and convolution states between attention layers. `make architectures` compares all.
@pytest.mark.parametrize(
    "kind",
    [
        "phimoe",
        "mamba",
        "deepseek_v32",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "doge", "lfm2")),
    ],
)
def test_a_model_that_works_computes_the_same_as_plain_transformers(kind: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = comparison.compare(kind, tmp_path)
    finally:
        torch.set_num_threads(threads)
    allowed, _ = models.TOLERANCES.get(kind, (comparison.TOLERANCE, ""))
    assert result.largest < allowed
    assert result.packed == (kind in ("llama", "phimoe"))


@every_case("kind", models.REFUSED)
def test_a_model_that_is_refused_names_a_remedy(kind: str, tmp_path: Path) -> None:
    assert " give " in comparison.refuse(kind, tmp_path).refused


def test_every_causal_type_of_transformers_is_tested_or_has_a_reason() -> None:
    assert {*models.WORKING, *models.REFUSED, *models.NOT_TESTED} >= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not {*models.WORKING} & {*models.REFUSED, *models.NOT_TESTED}


def test_the_page_lists_every_tested_architecture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for kind in (*models.WORKING, *models.REFUSED, *models.NOT_TESTED):
        assert f"| `{kind}` |" in text, f"{kind} is missing; run make architectures"
