"""Files of a sharded checkpoint, one per rank, in the folder ``sharded`` of a model's directory. Does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

from quartet.errors import ModelError

FOLDER = "sharded"
GROUPS_FILE = "optimizer.json"
"""File with the optimizer's parameter groups, next to the ranks' files."""
_UNLOADED_FILE = "unloaded.safetensors"
_NAME = re.compile(r"rank-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)


def is_sharded(directory: str | Path) -> bool:
    """Return whether this directory contains a model, or the optimizer state of an adapter, in one file per rank."""
    return (Path(directory) / FOLDER).is_dir()


def rank_file(directory: Path, rank: int, size: int) -> Path:
    """Return the file of one of ``size`` ranks."""
    return directory / FOLDER / f"rank-{rank:05d}-of-{size:05d}.safetensors"


def unloaded_file(directory: Path) -> Path:
    """Return the file with the tensors that are not in the model, such as those of towers for images."""
    return directory / FOLDER / _UNLOADED_FILE


def rank_files(directory: str | Path) -> list[Path]:
    """Return the files of all ranks, in their order. Raises ModelError if one is missing."""
    folder = Path(directory) / FOLDER
    names = sorted(path.name for path in folder.glob("*.safetensors") if path.name != _UNLOADED_FILE)
    numbers = [match.groups() for name in names if (match := _NAME.fullmatch(name))]
    sizes = {int(size) for _, size in numbers}
    if len(sizes) != 1 or len(numbers) != len(names) or any(int(rank) >= int(size) for rank, size in numbers):
        raise ModelError(
            f"sharded checkpoint {folder}: expected the files rank-00000-of-N.safetensors and so on of one save, got "
            f"{', '.join(names) or 'none'}; copy the folder again, or take the checkpoint before it"
        )
    size = sizes.pop()
    files = [rank_file(Path(directory), rank, size) for rank in range(size)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            f"sharded checkpoint {folder}: {', '.join(missing)} of {size} files is missing; copy the folder again, or take the "
            "checkpoint before it"
        )
    return files
