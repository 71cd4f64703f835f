"""Saves of a worker group: each rank writes its file in the background, then rank 0 installs the directory.

The directory exists only when the files of all ranks are on the disk, as rank 0 knows from their reports.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from quartet.contract.domain_errors import domain_error
from quartet.contract.weights import SavedFile
from quartet.errors import MismatchError, QuartetError, ServiceFailed, StorageFailed
from quartet.model_files.sharded_files import FOLDER, GROUPS_FILE, rank_file, unloaded_file
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.training.optimizer import MasterWeightAdamW, optimizer_parts, parameter_groups
from quartet.models.weights.lora import Adapter
from quartet.models.weights.saved_state import Part
from quartet.models.weights.snapshot import Writer, host_copy, save_failure
from quartet.models.weights.streamed_model import StreamedModel
from quartet.models.weights.towers import unloaded_tensors
from quartet.models.workers.group import WorkerGroup
from quartet.models.workers.sharded_checkpoint import OPTIMIZER, WEIGHTS, write_parts
from quartet.models.workers.sharding import host_parts, part_of
from quartet.system.durable_files import (
    create_replacement,
    describe_files,
    install_replacement,
    is_storage_error,
    remove_replacement,
    sha256,
    temporary_directory,
)

log = structlog.get_logger()

_WRITTEN, _REFUSED_BY_DISK, _FAILED = range(3)
_DIGEST = struct.Struct("<4q")


class GroupSaves:
    """Saves of one model. All ranks make the same calls, in the same order."""

    def __init__(self, workers: WorkerGroup, root: Path) -> None:
        """``root``: the run's directory, to which the paths of saved files are relative."""
        self._workers, self._root = workers, root
        self._running: Future[list[SavedFile]] | None = None

    def _create_directory(self, target: Path) -> None:
        """Wait for the save before, and create a temporary directory that will replace ``target``."""
        self._workers.prepare_background()
        if self._running is not None:
            self._running.exception()
        self._workers.agreed(lambda: self._create(target) if self._workers.rank == 0 else None)

    def dtype(self, model: Any) -> torch.dtype:
        """Return the type of the model's saved weights."""
        result: torch.dtype = self._workers.compute_type or model.dtype
        return result

    def save_checkpoint(
        self,
        target: Path,
        writers: Sequence[Writer],
        saving: Writer,
        model: nn.Module | None,
        optimizer: MasterWeightAdamW,
    ) -> Callable[[], list[SavedFile]]:
        """Copy this rank's parts of the weights of ``model``, if there is one, and of the optimizer's state to host memory.

        Start to write them. ``writers`` write the other files, on rank 0; ``saving`` is called between the files. Return a
        function that waits and returns all files, on rank 0. It raises StorageFailed if the disk of a rank refuses a file,
        ServiceFailed if another rank has another error, and rank 0's error as it is. Raises StorageFailed on rank 0,
        ServiceUnavailable on the others.
        """
        self._create_directory(target)
        rank, size = self._workers.rank, self._workers.size
        parts: dict[str, Part] = {}
        if model is not None:
            parts = {f"{WEIGHTS}{name}": part for name, part in host_parts(model, self._workers).items()}
        for name, part in optimizer_parts(optimizer).items():
            if part.saved_here:
                parts[f"{OPTIMIZER}{name}"] = part.of(host_copy(part.tensor))
        groups = parameter_groups(optimizer)

        def write_groups(directory: Path) -> None:
            (directory / FOLDER).mkdir(exist_ok=True)
            (directory / FOLDER / GROUPS_FILE).write_text(groups, encoding="utf-8")

        def write_part(directory: Path) -> None:
            (directory / FOLDER).mkdir(exist_ok=True)
            write_parts(rank_file(directory, rank, size), parts)
            # Before the save ends, so that there is memory for the copy of the next one.
            parts.clear()

        others = [] if rank else [*writers, write_groups]
        if not rank and model is not None and (unloaded := unloaded_tensors(model)) is not None:

            def write_unloaded(directory: Path) -> None:
                unloaded.write_processor(directory)
                unloaded.write(unloaded_file(directory))

            others.append(write_unloaded)
        return self._start(target, [*others, saving, write_part])

    def save_model(
        self, target: Path, writers: Sequence[Writer], model: Any, adapter: Adapter | None
    ) -> Callable[[], list[SavedFile]]:
        """Write the complete model, with the ``adapter`` merged, in Hugging Face format: one gathered tensor after the other.

        ``writers`` write the other files. Return a function that makes the directory visible and returns its files, on rank 0.
        It raises StorageFailed. Raises StorageFailed or ServiceFailed on rank 0, ServiceUnavailable on others.
        """
        self._create_directory(target)
        state = adapter.base_state() if adapter else model.state_dict(keep_vars=True)
        merge = adapter.merger() if adapter else None
        values: dict[int, tuple[str, torch.Tensor]] = {}
        for name, value in state.items():
            values.setdefault(id(value), (name, value))
        write: Callable[[str, torch.Tensor], None] | None = None
        failures: list[Exception] = []
        with ExitStack() as stack:
            if self._workers.rank == 0:
                with _collected(failures):
                    fresh = temporary_directory(target)
                    for writer in writers:
                        writer(fresh)
                    stubs = {key: self._stub(value) for key, (_, value) in values.items()}
                    shapes = {name: stubs[id(value)] for name, value in state.items()}
                    write = stack.enter_context(StreamedModel(model, shapes, fresh)).write
            for name, value in values.values():
                complete = self._workers.complete(value)
                if write is not None and not failures:
                    with _collected(failures):
                        write(name, complete if merge is None else merge(name, complete))
            with _collected(failures):
                # The disk may refuse what the files still have in their buffers.
                stack.close()
                if write is not None and not failures and (unloaded := unloaded_tensors(model)) is not None:
                    unloaded.add_to(temporary_directory(target))
        self._workers.agreed(lambda: self._raise(target, failures))
        return lambda: self._install(target)

    def _stub(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor without memory, of the shape and the type that ``value`` has when it is complete."""
        kind = self._workers.compute_type if isinstance(value, DTensor) else None
        return torch.empty(part_of(value, self._workers).shape, dtype=kind or value.dtype, device="meta")

    def _raise(self, target: Path, failures: Sequence[Exception]) -> None:
        if failures:
            remove_replacement(target)
            raise _known_failure(target, failures[0]) from failures[0]

    def _start(self, target: Path, writers: Sequence[Writer]) -> Callable[[], list[SavedFile]]:
        """Let ``writers`` fill the new directory in the background. The last one writes ``rank_file``."""
        result: Future[list[SavedFile]] = Future()
        self._running = result

        def run() -> None:
            try:
                result.set_result(self._write(target, writers))
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="save", daemon=True).start()
        return result.result

    def _install(self, target: Path) -> list[SavedFile]:
        try:
            install_replacement(target)
        except Exception as error:
            raise save_failure(target, error) from error
        finally:
            remove_replacement(target)
        return describe_files(self._root, target)

    def _create(self, target: Path) -> None:
        try:
            create_replacement(target)
        except OSError as error:
            raise _known_failure(target, error) from error

    def _write(self, target: Path, writers: Sequence[Writer]) -> list[SavedFile]:
        fresh = temporary_directory(target)
        rank, size = self._workers.rank, self._workers.size
        failure: Exception | None = None
        report = [_FAILED, 0, *_DIGEST.unpack(bytes(_DIGEST.size))]
        try:
            with suppress_hf_logging():
                for write in writers:
                    write(fresh)
            file = rank_file(fresh, rank, size)
            report = [_WRITTEN, file.stat().st_size, *_DIGEST.unpack(bytes.fromhex(sha256(file)))]
        except Exception as error:
            failure = error
            log.warning("save failed", rank=rank, directory=str(target), error=f"{type(error).__name__}: {error}")
            report[0] = _REFUSED_BY_DISK if is_storage_error(error) else _FAILED
        reports = self._workers.gather_reports(report)
        if rank:
            return []
        try:
            if failure is not None:
                raise save_failure(target, failure) from failure
            _check(target, [state for state, *_ in reports])
            saved = [_describe(rank_file(fresh, index, size), *entry) for index, entry in enumerate(reports)]
            try:
                install_replacement(target)
            except Exception as error:
                raise save_failure(target, error) from error
        finally:
            remove_replacement(target)
        known = {rank_file(target, index, size): file for index, file in enumerate(saved)}
        files = sorted(path for path in target.rglob("*") if path.is_file())
        return [
            SavedFile(
                path.relative_to(self._root).as_posix(), *(known.get(path) or (path.stat().st_size, sha256(path)))
            )
            for path in files
        ]


@contextmanager
def _collected(failures: list[Exception]) -> Iterator[None]:
    """Append an error to ``failures``, so that this rank continues to the exchange in which the others wait for it."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def _known_failure(target: Path, error: Exception) -> QuartetError:
    """Return the failure of a save as an error that ``agreed`` tells the other ranks."""
    if known := domain_error(save_failure(target, error)):
        return known
    log.warning("save failed", directory=str(target), error=f"{type(error).__name__}: {error}")
    return ServiceFailed(
        f"save {target}: {type(error).__name__}: {error}; the previous content is unchanged; see the log of this service"
    )


def _describe(path: Path, state: int, size: int, *digest: int) -> tuple[int, str]:
    """Return size and digest of a rank's file. Raises MismatchError if it is not in the directory of rank 0."""
    if not path.is_file() or path.stat().st_size != size:
        raise MismatchError(
            f"saved file {path}: missing, or not as its rank reported it; run.directory must be a path that all ranks share"
        )
    return size, _DIGEST.pack(*digest).hex()


def _check(target: Path, states: Sequence[int]) -> None:
    for state in (_FAILED, _REFUSED_BY_DISK):
        ranks = ", ".join(str(rank) for rank, other in enumerate(states) if other == state)
        if ranks and state == _FAILED:
            raise ServiceFailed(f"save {target}: rank {ranks} of {len(states)} has failed; see the log of this service")
        if ranks:
            raise StorageFailed(
                f"model directory {target}: rank {ranks} of {len(states)} cannot write its file; see the log of this service. "
                "Free space on that disk, or give a writable directory, and save again"
            )
