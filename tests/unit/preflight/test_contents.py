"""The tensors of the models of a run are compared with their config.json before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quartet.errors import ModelError
from quartet.preflight import contents
from tests.preflight_workers import run_here
from tests.unit.models import tiny
from tests.unit.preflight.files import check_inputs, config


def test_tensors_without_a_place_in_the_model_are_refused_with_the_config_key(real_models: Path) -> None:
    path = real_models / "policy/model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "model.layers.0.mlp.up_proj.bias": torch.zeros(48)}, path, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"^actor\.model .*/policy: 1 tensors .* no place .*'model\.layers\.0\.mlp\.up_proj\.bias'"
    ):
        check_inputs(config(real_models))


def test_a_reward_model_with_fewer_token_ids_than_the_policy_is_refused(real_models: Path) -> None:
    small = tiny.classifier("llama", vocab_size=tiny.VOCABULARY - 8, max_position_embeddings=256)
    tiny.saved(small, real_models / "reward")
    with pytest.raises(
        ModelError, match=r"reward\.model .*: embeds 53 token ids, actor\.model can generate 61; resize"
    ):
        check_inputs(config(real_models))


def test_a_comparison_is_kept_until_a_file_changes(
    real_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUARTET_CACHE", str(tmp_path / "cache"))
    path = real_models / "reward/model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({**tensors, "v_head.weight": torch.zeros(1)}, path, {"format": "pt"})
    first = check_inputs(config(real_models))
    assert [note.partition(" which ")[0] for note in first if "v_head" in note] == [
        f"warning: {role}.model {real_models}/reward: the files hold v_head.weight," for role in ("reward", "critic")
    ]
    monkeypatch.setattr(contents, "checking_process", None)
    assert check_inputs(config(real_models)) == first
    run_here(monkeypatch)
    description = json.loads((real_models / "policy/config.json").read_text())
    (real_models / "policy/config.json").write_text(json.dumps({**description, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"^actor\.model .*'model\.layers\.2"):
        check_inputs(config(real_models))
