"""Sharded checkpoints with torch.distributed.checkpoint (DCP): each rank writes its parts, and reads those that it needs.

DCP plans what is written and read, also for another number of ranks. Its own storage and its coordination of ranks use pickle, so
files are safetensors here, and each rank plans by itself: it knows from its parts what it saves. The header of a file has DCP's
``DCP_SHARDING_INFO``, so torch's HuggingFaceStorageReader reads the files, too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from quartet.contract.domain_errors import domain_error
from quartet.errors import ModelError
from quartet.model_files.sharded_files import FOLDER, GROUPS_FILE, rank_files
from quartet.models.weights.safetensors_file import DTYPES, SafetensorsFile
from quartet.models.weights.saved_state import Part, read_block

WEIGHTS, OPTIMIZER = "weights.", "optimizer."
"""Prefixes of the names of tensors in a checkpoint."""
INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


class _Block:
    """A part as a tensor of DCP."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._chunk = ChunkStorageMetadata(torch.Size(part.offsets), part.tensor.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        tensor = self.part.tensor
        data = TensorWriteData(self._chunk, TensorProperties(dtype=tensor.dtype), torch.Size(self.part.shape))
        return [WriteItem(MetadataIndex(name, self._chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner for the blocks of one rank. There is no global plan, because no other rank has the same blocks to save."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Metadata]:
        return all_plans, Metadata({})

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        block: _Block = self.state_dict[index.fqn]
        return block.part.tensor


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for the blocks of one rank."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        block: _Block = self.state_dict[index.fqn]
        return block.part.tensor


class _Writer(StorageWriter):
    """Writer of one rank's file, which it flushes to the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between saves."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder exists."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        tensors = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        info = {item.index.fqn: {_OFFSETS: list(item.index.offset)} for item in plan.items}
        with SafetensorsFile(self._path, tensors, {INFO: json.dumps(info, sort_keys=True)}) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
            file.flush()
        done: Future[Any] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """The headers of the files are the metadata."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Reader(StorageReader):
    """Reader of the files of all ranks. It opens only those that have parts of the plan."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The metadata was read before."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        by_file: dict[Path, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._metadata.storage_data[item.storage_index], []).append(item)
        for path, items in by_file.items():
            with safetensors.safe_open(path, framework="pt") as file:
                for item in items:
                    region = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    read_block(file, item.storage_index.fqn, region, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def write_parts(path: Path, parts: Mapping[str, Part]) -> None:
    """Write the parts that this rank saves to its file, and flush it to the disk. Raises OSError. Runs on any thread."""
    blocks = {name: _Block(part) for name, part in sorted(parts.items()) if part.saved_here and part.tensor.numel()}
    with _plain_errors():
        save(blocks, storage_writer=_Writer(path), planner=_SavePlanner(), no_dist=True)


class ShardedState:
    """The tensors of a sharded checkpoint whose names begin with ``prefix``, without it. See ``SavedState``."""

    def __init__(self, directory: str | Path, prefix: str) -> None:
        """Read the headers of all files. Raises ModelError if a file is missing, damaged, or of another save."""
        self.place = f"sharded checkpoint {Path(directory) / FOLDER}"
        self._prefix = prefix
        tensors, locations = _read_headers(rank_files(directory), self.place)
        self._metadata = Metadata({**tensors}, storage_data=locations)
        own = {name.removeprefix(prefix): entry for name, entry in tensors.items() if name.startswith(prefix)}
        self.shapes = {name: tuple(entry.size) for name, entry in own.items()}
        self.types: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in own.items()}
        groups = Path(directory) / FOLDER / GROUPS_FILE
        self.metadata = {"param_groups": groups.read_text(encoding="utf-8")} if groups.is_file() else {}

    @torch.no_grad()
    def read(self, parts: Mapping[str, Part]) -> None:
        """Read the state into ``parts``. Raises ModelError, or OutOfMemory on a GPU, so that a rank can tell the others."""
        blocks: dict[str, Any] = {
            self._prefix + name: _Block(part) for name, part in parts.items() if part.tensor.numel()
        }
        try:
            with _plain_errors():
                load(blocks, storage_reader=_Reader(self._metadata), planner=_LoadPlanner(), no_dist=True)
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"{self.place}: cannot be read: {error}; take the checkpoint before it") from error
        except Exception as error:
            if known := domain_error(error):
                raise known from error
            raise

    def tensor(self, name: str) -> torch.Tensor:
        """Return a complete tensor."""
        result = torch.empty(self.shapes[name], dtype=self.types[name])
        self.read({name: Part.whole(result)})
        return result


def _read_headers(files: list[Path], place: str) -> tuple[dict[str, TensorStorageMetadata], dict[MetadataIndex, Path]]:
    """Return every tensor with its blocks, and the file of each block. Raises ModelError."""
    tensors: dict[str, TensorStorageMetadata] = {}
    locations: dict[MetadataIndex, Path] = {}
    for path in files:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                info = json.loads((file.metadata() or {})[INFO])
                for name in file.keys():  # noqa: SIM118
                    offsets = torch.Size(info[name][_OFFSETS])
                    block = file.get_slice(name)
                    sizes, dtype = torch.Size(block.get_shape()), DTYPES[block.get_dtype()]
                    index = MetadataIndex(name, offsets)
                    if index in locations:  # Another rank has saved the same block.
                        continue
                    entry = tensors.setdefault(name, TensorStorageMetadata(TensorProperties(dtype=dtype), sizes, []))
                    entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
                    locations[index] = path
        except Exception as error:  # safetensors raises its own error, OSError, KeyError or JSON's
            raise ModelError(f"{place}: {path.name} cannot be read: {error}; take the checkpoint before it") from error
    for name, entry in tensors.items():
        ends = [[start + size for start, size in zip(c.offsets, c.sizes, strict=True)] for c in entry.chunks]
        entry.size = torch.Size(max(end) for end in zip(*ends, strict=True))
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ModelError(
                f"{place}: {name} is not complete; expected the files of one save, take the checkpoint before it"
            )
    return tensors, locations


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise errors as they are: DCP raises a BaseException that holds them. Suppress its note that it uses no process group."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        try:
            yield
        except CheckpointException as error:
            [(cause, _)] = error.failures.values()
            raise cause from None
