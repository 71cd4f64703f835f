"""Mixed models: the formula, float32, and models that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.errors import ModelError
from quartet.models.weights.loading import load_causal_lm
from quartet.models.weights.mixing import write_mixed
from tests.unit.models import tiny


def saved(directory: Path, seed: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    model = tiny.causal("qwen2", **changes).to(dtype)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def mixed(new: Path, old: Path | None, alpha: float, target: Path) -> bytes:
    target.mkdir()
    write_mixed(new, old, alpha, target)
    return (target / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_model_is_between_the_two_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    models = [saved(tmp_path / f"policy-{seed}", seed, dtype) for seed in (1, 2, 3)]
    mixed(tmp_path / "policy-1", None, 0.25, tmp_path / "0")
    for version, seed in ((1, 2), (2, 3)):
        mixed(tmp_path / f"policy-{seed}", tmp_path / f"{version - 1}", 0.25, tmp_path / f"{version}")
    result = load_causal_lm(tmp_path / "2", "float32").state_dict()
    first, second, third = (model.state_dict() for model in models)
    for name, value in result.items():
        expected = 0.25 * third[name].double() + 0.75 * (0.25 * second[name].double() + 0.75 * first[name].double())
        torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=1e-6)


def test_equal_inputs_give_equal_bytes_and_equal_models_stay(tmp_path: Path) -> None:
    for seed in (1, 2):
        saved(tmp_path / f"policy-{seed}", seed)
    start = mixed(tmp_path / "policy-1", None, 0.6, tmp_path / "0")
    assert mixed(tmp_path / "policy-1", tmp_path / "0", 0.6, tmp_path / "same") == start
    first, again = (mixed(tmp_path / "policy-2", tmp_path / "0", 0.6, tmp_path / name) for name in ("1", "again"))
    assert first == again != start


def test_another_model_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "policy", 1)
    saved(tmp_path / "larger", 1, num_hidden_layers=3)
    with pytest.raises(ModelError, match="has other weights than the policy"):
        mixed(tmp_path / "policy", tmp_path / "larger", 0.6, tmp_path / "a")
    (tmp_path / "larger" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        mixed(tmp_path / "policy", tmp_path / "larger", 0.6, tmp_path / "b")
