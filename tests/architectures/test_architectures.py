"""A part of `make architectures`, and the completeness of the rule for models that are refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quartet.errors import ModelError
from quartet.model_files.model_support import not_causal_reason, uncacheable_reason
from quartet.models.weights.loading import check_cacheable_config
from tests.architectures import comparison, models
from tests.every_case import every_case

PAGE = Path(__file__).parents[2] / "docs/reference/architectures.md"


# A plain model, positions without rotation, packed experts, a router that is a linear layer, and a mask of the model's own.
@pytest.mark.parametrize("kind", ["llama", "opt", "qwen2_moe", "phimoe", "doge"])
def test_a_model_that_works_computes_the_same_as_plain_transformers(kind: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = comparison.compare(kind, tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert result.largest < comparison.TOLERANCE
    assert result.packed == (kind != "doge")


@every_case("kind", models.REFUSED)
def test_a_model_that_is_refused_names_a_remedy(kind: str, tmp_path: Path) -> None:
    assert " give " in comparison.refuse(kind, tmp_path).refused


def test_the_rule_refuses_every_model_type_whose_cache_has_other_layers() -> None:
    missed = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        layers = set[type]()
        # The default sizes of a few types do not fit each other; transformers raises many types of errors for them.
        with contextlib.suppress(Exception):
            config = transformers.AutoConfig.for_model(kind)
            layers = {type(layer) for layer in DynamicCache(config=config).layers}
        if layers - {DynamicLayer, DynamicSlidingWindowLayer}:
            content = json.loads(json.dumps(config.to_dict(), default=str))
            if uncacheable_reason(content) is None and not_causal_reason(content) is None:
                missed.append(kind)
    assert missed == []


def test_the_loader_refuses_a_model_without_weights_by_its_config(tmp_path: Path) -> None:
    transformers.MambaConfig(vocab_size=61).save_pretrained(tmp_path / "m")
    with pytest.raises(ModelError, match=r"^model .*/m: its layers \(mamba\) keep other state"):
        check_cacheable_config(tmp_path / "m")
    models.tiny_config("llama").save_pretrained(tmp_path / "l")
    check_cacheable_config(tmp_path / "l")


def test_the_page_lists_every_tested_architecture() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for kind in (*models.WORKING, *models.REFUSED):
        assert f"| `{kind}` |" in text, f"{kind} is missing; run make architectures"
