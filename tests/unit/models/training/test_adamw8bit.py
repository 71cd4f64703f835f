"""AdamW with moments of 8 bits: torchao's steps, its memory, float32 master weights, and checkpoints without pickles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from quartet.config.models import OptimizerConfig
from quartet.errors import ConfigError, ModelError
from quartet.models.training.optimizer import create_optimizer, load_optimizer
from quartet.models.training.updates import update_policy
from tests.unit.models import tiny, updates
from tests.unit.models.adapters import IDS, same, snapshot
from tests.unit.models.saving import save_optimizer

RATE, DECAY = 1e-2, 0.1
CONFIG = OptimizerConfig(kind="adamw8bit")
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes with which matrices have 4096 values and more."""


@pytest.fixture(autouse=True)
def _needs_torchao(request: pytest.FixtureRequest) -> None:
    if "without_torchao" not in request.node.name:
        pytest.importorskip("torchao")


def build(config: OptimizerConfig | None = CONFIG, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = tiny.causal("llama", **WIDE).to(dtype)
    return model, create_optimizer(model, RATE, weight_decay=DECAY, config=config)


def learn(model: Any, optimizer: Any, seed: int = 0) -> None:
    data = updates.experience(model, seed)
    update_policy(model, optimizer, data, updates.settings(learning_rate=RATE), updates.LOSS, 40)


def quantized(optimizer: Any) -> list[Any]:
    return [entry["exp_avg"] for entry in optimizer.state.values() if hasattr(entry["exp_avg"], "codes")]


def test_steps_are_those_of_torchao_without_a_compiler() -> None:
    from torchao.optim import AdamW8bit

    (ours, optimizer), (theirs, _) = build(), build()
    parameters = list(theirs.parameters())
    peer = AdamW8bit(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=RATE,
    )
    for number in range(3):
        for model, stepping in ((ours, optimizer), (theirs, peer)):
            model(IDS + number).logits.square().mean().backward()
            with torch.compiler.set_stance("force_eager"):
                stepping.step()
            stepping.zero_grad()
    assert same(snapshot(ours), snapshot(theirs))
    assert len(quantized(optimizer)) == 10


def test_it_has_an_effect_in_updates_and_stays_near_adamw() -> None:
    (ours, optimizer), (theirs, plain), (start, _) = build(), build(None), build()
    for seed in range(3):
        learn(ours, optimizer, seed), learn(theirs, plain, seed)
    names = [name for name, value in snapshot(ours).items() if value.numel() >= 4096]
    a, b, c = (torch.cat([snapshot(model)[name].flatten() for name in names]) for model in (ours, theirs, start))
    assert 0 < (a - b).norm() < 0.5 * (b - c).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_from_a_checkpoint_is_bit_identical(dtype: torch.dtype, tmp_path: Path) -> None:
    (model, optimizer), (restored, second), (_, plain) = build(dtype=dtype), build(dtype=dtype), build(None, dtype)
    for seed in range(2):
        learn(model, optimizer, seed)
    save_optimizer(optimizer, tmp_path / "o")
    saved = safetensors.torch.load_file(tmp_path / "o")
    kinds = {name.partition(".")[2]: value.dtype for name, value in saved.items()}
    assert (kinds["exp_avg.codes"], kinds["exp_avg_sq.scale"]) == (torch.uint8, torch.float32)
    restored.load_state_dict(model.state_dict())
    load_optimizer(second, tmp_path / "o")
    assert len(quantized(second)) == len(quantized(optimizer)) > 0
    save_optimizer(second, tmp_path / "again")
    assert (tmp_path / "o").read_bytes() == (tmp_path / "again").read_bytes()
    learn(model, optimizer, 2), learn(restored, second, 2)
    assert same(snapshot(model), snapshot(restored))
    if dtype is torch.bfloat16:
        for master, parameter in second.parameter_of_master_weight.items():
            assert torch.equal(master.to(dtype), parameter)
        assert len(second.parameter_of_master_weight) == len(list(model.parameters()))
    with pytest.raises(ModelError, match=r"is of optimizer\.kind adamw8bit, and the config has adamw"):
        load_optimizer(plain, tmp_path / "o")


def test_moments_need_a_quarter_of_the_memory(tmp_path: Path) -> None:
    sizes = []
    for config in (CONFIG, None):
        model, optimizer = build(config)
        learn(model, optimizer)
        save_optimizer(optimizer, tmp_path / "o")
        large = {str(i) for i, p in enumerate(optimizer.stepped_parameters()) if p.numel() >= 4096}
        saved = safetensors.torch.load_file(tmp_path / "o")
        sizes.append(sum(value.nbytes for name, value in saved.items() if name.partition(".")[0] in large))
    assert sizes[0] < 0.26 * sizes[1]


def test_without_torchao_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"adamw8bit: torchao is not installed; install it with pip install"):
        build()
