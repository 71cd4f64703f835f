"""The doctor's estimates."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.cli.doctor import TRAINED_BYTES, _memory, _requirements, doctor
from quartet.config import Config, parse_config
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.types import Role
from tests.unit.models import tiny, updates


def config(folder: Path, dtype: torch.dtype, **actor: Any) -> Config:
    model = str(tiny.saved(tiny.causal("llama", vocab_size=4096).to(dtype), folder / "m"))
    tree = {"data": {"prompts": "p.jsonl"}, "actor": {"model": model, **actor}, "reward": {"model": model}}
    return Config.model_validate({"run": {"name": "r", "steps": 1}, "critic": {"model": model}, **tree})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_models_are_estimated_with_gradients_and_optimizer_state(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.causal("llama", vocab_size=4096).to(dtype)
    optimizer = create_optimizer(model, 0.1)
    update_policy(model, optimizer, updates.experience(model), updates.settings(), updates.LOSS, 1000)
    moments = [entry[name] for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    # A gradient has the dtype of its parameter.
    tensors = [*model.parameters(), *model.parameters(), *optimizer.parameter_of_master_weight, *moments]
    total, count = sum(t.nbytes for t in tensors), sum(p.numel() for p in model.parameters())
    assert total == TRAINED_BYTES * count
    for role in (Role.ACTOR, Role.CRITIC):
        text = _memory(config(tmp_path, dtype), role)
        assert text == f", about {total / 2**20:.1f} MiB for weights, gradients and optimizer"


def test_models_without_full_training_are_estimated_by_their_weights(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.bfloat16, lora={"rank": 2})
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    for role in (Role.ACTOR, Role.REWARD):
        assert _memory(settings, role) == f", about {size / 2**20:.1f} MiB for weights"


def test_unreadable_weights_are_not_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.bfloat16)
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x10")
    assert not _memory(settings, Role.ACTOR)


def test_a_machine_without_torch_fails_one_check_and_passes_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not doctor(None, [], [])
    lines = capsys.readouterr().out.splitlines()
    [failed] = [line for line in lines if "failed" in line]
    assert "torch" in failed
    assert "pip install" in " ".join(" ".join(lines).split())


def test_a_port_of_the_gateway_that_is_in_use_is_reported(tmp_path: Path) -> None:
    settings = config(tmp_path, torch.float32)
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        settings = parse_config({**settings.model_dump(mode="json"), "gateway": {"listen": listen}}, "test")
        [finding] = [finding for finding in _requirements(settings) if finding.subject == "gateway"]
    assert not finding.ok
    assert f"gateway.listen {listen}: cannot listen there" in finding.detail
