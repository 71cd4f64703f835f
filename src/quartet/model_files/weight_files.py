"""Weight files of a checkpoint, by the rules of transformers, and their headers. Does not import torch, reads no weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.errors import ModelError
from quartet.model_files.sharded_files import is_sharded, rank_files

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
VALUE_HEAD_FILE = "value_head.safetensors"
MAX_HEADER_BYTES = 100 * 1024**2
"""Maximum length of the header of a safetensors file, as in the safetensors library."""
LFS_POINTER = (
    "a reference of Git LFS, without the content; run git lfs pull in its folder, or download it with hf download"
)
_LFS_START = b"version https://git-lfs.github.com/spec/"
_DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
"""Files of torch.distributed.checkpoint, which transformers prefers to all others."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in the header of a safetensors file: name of its type, shape, and place of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(directory: Path) -> list[Path]:
    """Return the files from which a model is loaded. Raises ModelError if they are missing, incomplete or ambiguous.

    transformers reads model.safetensors even if an index names other files, and reads no files that the index does not name.
    """
    if is_sharded(directory):
        return rank_files(directory)
    if any(_DISTRIBUTED.fullmatch(path.name) for path in directory.glob("shard-*.safetensors")):
        raise ModelError(
            "contains files of torch.distributed.checkpoint (shard-...-model-...), whose values would be read instead of "
            f"{SINGLE_FILE}; load the model with transformers, and save it with save_pretrained"
        )
    if other := _read_object(directory / "config.json").get("transformers_weights"):
        raise ModelError(
            f"config.json names other weights (transformers_weights: {other!r}); rename that file to {SINGLE_FILE}, and remove "
            "the key"
        )
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not index.is_file():
        if single.is_file():
            return [single]
        if names := sorted(path.name for path in directory.glob("*.safetensors")):
            raise ModelError(
                f"contains neither {SINGLE_FILE} nor {INDEX_FILE}, but {', '.join(names[:3])}; save the model with "
                "save_pretrained"
            )
        raise ModelError("contains no safetensors files; save the model with save_pretrained")
    names = sorted(set(_weight_map(index).values()))
    if single.is_file() and names != [SINGLE_FILE]:
        raise ModelError(
            f"contains {SINGLE_FILE}, and {INDEX_FILE} that names other files; transformers reads the first, which may be older: "
            "delete the one that is not the model"
        )
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files that {INDEX_FILE} names are missing, the first {missing[0]}; copy or "
            "download them"
        )
    return [directory / name for name in names]


def read_headers(directory: Path) -> dict[str, tuple[Path, TensorEntry]]:
    """Return each tensor of a model with its file. Raises ModelError for damaged files, and for an index that is not theirs.

    Not for a checkpoint in one file per rank, whose tensors are blocks.
    """
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    files = weight_files(directory)
    for path in files:
        for name, entry in read_header(path).items():
            if name in tensors:
                raise ModelError(
                    f"tensor {name} is in {tensors[name][0].name} and in {path.name}; delete the file that does not belong to "
                    "the model, and correct the index"
                )
            tensors[name] = path, entry
    index = directory / INDEX_FILE
    if index.is_file():
        for name, file in _weight_map(index).items():
            if name not in tensors or tensors[name][0].name != file:
                raise ModelError(
                    f"{INDEX_FILE} says that tensor {name} is in {file}, which does not contain it; the files are of different "
                    "saves: copy or download them again"
                )
    return tensors


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file. Raises ModelError if it is damaged, or longer or shorter than it states."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError("header too long")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        entries = {
            str(name): TensorEntry(
                str(tensor["dtype"]),
                tuple(int(size) for size in tensor["shape"]),
                *(8 + length + int(offset) for offset in tensor["data_offsets"]),
            )
            for name, tensor in header.items()
        }
        expected = max((entry.end for entry in entries.values()), default=8 + length)
        if any(size < 0 for entry in entries.values() for size in entry.shape):
            raise ValueError("negative size")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        if is_lfs_pointer(path):
            raise ModelError(f"{path.name} is {LFS_POINTER}") from None
        raise ModelError(f"{path.name} is not a safetensors file, or damaged; copy or download it again") from None
    if path.stat().st_size != expected:
        raise ModelError(
            f"{path.name} has {path.stat().st_size:,} bytes, its header says {expected:,}; copy or download it again"
        )
    return entries


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file holds a reference of Git LFS instead of the content, as a clone without Git LFS leaves it."""
    try:
        with path.open("rb") as opened:
            return opened.read(len(_LFS_START)) == _LFS_START
    except OSError:
        return False


def same_bytes(one: tuple[Path, TensorEntry], other: tuple[Path, TensorEntry]) -> bool:
    """Return whether two tensors of the same type have the same shape and values. Reads both."""
    entries = one[1], other[1]
    if entries[0].shape != entries[1].shape:
        return False
    left = entries[0].end - entries[0].start
    with one[0].open("rb") as first, other[0].open("rb") as second:
        first.seek(entries[0].start)
        second.seek(entries[1].start)
        while left:
            size = min(left, 16 * 1024**2)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} if the file is missing or another thing, which other checks report."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor in an index. Raises ModelError."""
    try:
        entries: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in entries.items()}
        if not names or any(Path(file).name != file or not file.endswith(".safetensors") for file in names.values()):
            raise ValueError("names")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(
            f"{index.name} is not the index of safetensors files in its directory; copy or download it again"
        ) from None
    return names
