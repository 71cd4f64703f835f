"""Helpers that take a snapshot and write it immediately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quartet.models.training.optimizer import OPTIMIZER_FILE, MasterWeightAdamW, snapshot_optimizer
from quartet.models.value_head import ValueModel
from quartet.models.weights.loading import snapshot_model
from quartet.models.weights.lora import Adapter
from quartet.models.weights.snapshot import Writer, write_model


def save_policy(model: Any, tokenizer: Any, directory: Path, adapter: Adapter | None = None) -> None:
    """Save the model, with its adapter merged into it."""
    write_model(directory, snapshot_model(model, adapter), *_of(tokenizer))


def save_adapter(adapter: Adapter, tokenizer: Any, directory: Path) -> None:
    """Save only the adapter."""
    write_model(directory, adapter.snapshot(), *_of(tokenizer))


def save_critic(critic: ValueModel, directory: Path, tokenizer: Any = None, adapter: Adapter | None = None) -> None:
    """Save the backbone, with its adapter merged into it, and the head."""
    write_model(directory, critic.snapshot(adapter), *_of(tokenizer))


def save_critic_adapter(critic: ValueModel, directory: Path, adapter: Adapter, tokenizer: Any = None) -> None:
    """Save the adapter of the backbone, and the head."""
    write_model(directory, critic.snapshot_adapter(adapter), *_of(tokenizer))


def save_optimizer(optimizer: MasterWeightAdamW, path: Path) -> None:
    """Save the state of the optimizer to the file ``path``."""
    folder = path.with_name(f"{path.name}-folder")
    folder.mkdir()
    snapshot_optimizer(optimizer)(folder)
    (folder / OPTIMIZER_FILE).rename(path)
    folder.rmdir()


def _of(tokenizer: Any) -> list[Writer]:
    return [] if tokenizer is None else [tokenizer.save_pretrained]
