"""Tiny models with adapters, and helpers that train and inspect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quartet.config.models import LoraConfig
from quartet.contract.update import Experience, OptimizationSettings, PolicyLossSettings
from quartet.models.training.optimizer import create_optimizer
from quartet.models.training.updates import update_policy
from quartet.models.weights.host_tensors import adapter_settings, host_tensors, named_weights
from quartet.models.weights.lora import Adapter, add_adapter
from quartet.weight_transfer.tensors import WeightSet, combined_digest, tensor_digest
from tests.unit.models import tiny

IDS = torch.tensor([[3, 4, 5, 6], [9, 8, 2, 7]])
PROMPTS, RESPONSES = [3, 1, 5], [4, 6, 3]
BATCH = tiny.batch(PROMPTS, RESPONSES)
SETTINGS = OptimizationSettings(num_epochs=2, num_mini_batches=1, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
RANK, ALPHA = 3, 12.0


def experience(step: int = 1) -> Experience:
    """Return random experience on ``BATCH``."""
    generator, tokens = np.random.default_rng(step), sum(RESPONSES)

    def noise() -> Any:
        return generator.standard_normal(tokens).astype(np.float32)

    return Experience(
        run="r",
        step=step,
        policy_version=step - 1,
        ids=("a", "b", "c"),
        batch=BATCH,
        scores=np.zeros(3, np.float32),
        log_probs=-1 + 0.1 * noise(),
        reference_log_probs=-1 + 0.1 * noise(),
        values=noise(),
        advantages=noise(),
        returns=noise(),
        actor_mask=np.ones(tokens, np.float32),
    )


def adapted(kind: str, name: str = "base", **changes: Any) -> tuple[Any, Adapter]:
    """Return a tiny model with a new adapter. ``changes``: its settings, and the seed."""
    model, seed = tiny.causal(kind), changes.pop("seed", 1)
    return model, add_adapter(model, name, LoraConfig(**{"rank": RANK, "alpha": ALPHA, **changes}), seed)


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return create_optimizer(model, 1e-2, (0.9, 0.95), 1e-8, 0.1)


def learn(model: Any, steps: int = 1, optimizer: torch.optim.AdamW | None = None) -> torch.optim.AdamW:
    """Apply this number of policy updates. Return the optimizer."""
    optimizer = optimizer or optimizer_of(model)
    for step in range(1, steps + 1):
        update_policy(model, optimizer, experience(step), SETTINGS, PolicyLossSettings(), 64)
    return optimizer


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def split(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split a state into that of the base model, under its names without an adapter, and that of the adapter."""
    below = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
    return below, {name: value for name, value in state.items() if ".lora_" in name}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], value) for name, value in b.items())


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weight_set(model: torch.nn.Module, adapter: Adapter | None = None, version: int = 1) -> WeightSet:
    """Return the weights as the actor publishes them."""
    tensors = host_tensors(named_weights(model, adapter))
    digest = combined_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
    return WeightSet(version, digest, tensors, adapter_settings(adapter))
