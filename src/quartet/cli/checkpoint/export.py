"""`quartet checkpoints export`: the policy of a checkpoint as a Hugging Face model."""

from __future__ import annotations

import shutil
from pathlib import Path

from quartet.adapter_files import is_adapter
from quartet.cli.checkpoint.list_and_tag import console
from quartet.config import load_config
from quartet.errors import ConfigError
from quartet.models.training.optimizer import OPTIMIZER_FILE
from quartet.models.weights.loading import load_causal_lm, snapshot_model
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import Writer, write_model
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.run_directory.checkpoints import Checkpoint
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import checkpoint_at, run_files
from quartet.types import Role


def export(run: Path, which: str, directory: Path) -> None:
    """Write the policy of a checkpoint in Hugging Face format. The files are the same as those of the final policy of a run.

    Raises ConfigError, also if the directory is not empty, and StorageFailed if it cannot be written.
    """
    files = run_files(run)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"export to {directory}: not an empty directory; choose a new or empty one")
    checkpoint = checkpoint_at(files, which)
    policy = checkpoint.path / Role.ACTOR
    writers = _merged(files, checkpoint) if is_adapter(policy) else [_copy_of(policy)]
    write_model(directory, *writers)
    console.print(f"{directory}: the policy of {run} after step {checkpoint.step}", highlight=False, soft_wrap=True)


def _copy_of(policy: Path) -> Writer:
    def write(target: Path) -> None:
        for file in sorted(policy.iterdir()):
            if file.name != OPTIMIZER_FILE:
                shutil.copyfile(file, target / file.name)

    return write


def _merged(files: RunFiles, checkpoint: Checkpoint) -> list[Writer]:
    """Merge the adapter in the same way as the actor does, so that the same weights give the same bytes."""
    config = load_config(files.config, [])
    actor, lora = config.actor, config.actor.lora
    if lora is None:
        raise ConfigError(
            f"{files.config}: actor.lora is null, but checkpoint {checkpoint.path} holds an adapter; restore actor.lora"
        )
    model = load_causal_lm(actor.model, actor.dtype)
    adapter = add_adapter(model, actor.model, lora.rank, lora.alpha, lora.target_modules)
    adapter.read(checkpoint.path / Role.ACTOR)
    return [snapshot_model(model, adapter), load_tokenizer(actor.model).save_pretrained]
