"""Writer of checkpoints: files go to a partial directory, which is renamed when its manifest is complete."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import structlog

from quartet import __version__
from quartet.contract.weights import SavedFile, SaveKind
from quartet.errors import ServiceFailed, StorageFailed
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.run_directory.checkpoints import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    checkpoint_step,
    delete_checkpoint,
    read_checkpoint,
    read_verified_checkpoint,
    rollback_target,
    tagged_checkpoints,
)
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.service_clients import wait_for_all
from quartet.system.durable_files import check_saved_files, fsync_path, is_storage_error, write_durably
from quartet.system.failpoints import failpoint

log = structlog.get_logger()


class CheckpointWriter:
    """Writer of the checkpoints of one run: ``checkpoints/step-000020/{actor,critic}/`` with a ``manifest.json``."""

    def __init__(
        self, files: RunFiles, keep: int, config_yaml: str, tag_best: Callable[[], None] = lambda: None
    ) -> None:
        """``tag_best`` is called after each checkpoint, before the oldest one is dropped."""
        self._files, self._keep, self._tag_best = files, keep, tag_best
        self._skipped: dict[str, bool] = {}
        """Notes on skipped checkpoints, and whether each has been reported."""
        self._config_hash = hashlib.sha256(config_yaml.encode()).hexdigest()

    def start(
        self,
        run: str,
        step: int,
        leader_epoch: int,
        trained: Sequence[ActorClient | CriticClient],
        state: dict[str, Any],
    ) -> PendingCheckpoint:
        """Start to save the trained models after ``step``, with the orchestrator's own ``state``.

        The services keep working, but the models must not be updated before ``finish``: a late save is refused.
        """
        name = f"step-{step:06d}"
        # Another epoch's saves may still be in progress, so the epoch is part of the name.
        partial = self._files.checkpoints / f".{name}.{leader_epoch}.partial"
        for leftover in self._files.checkpoints.glob(".step-*.partial"):
            epoch = leftover.name.split(".")[-2]
            if not epoch.isdecimal() or int(epoch) <= leader_epoch:
                shutil.rmtree(leftover, ignore_errors=True)
        manifest = {
            "format": FORMAT,
            "quartet": __version__,
            "run": run,
            "step": step,
            "leader_epoch": leader_epoch,
            "config_sha256": self._config_hash,
            "state": state,
            "roles": [client.role for client in trained],
        }
        directory = partial.relative_to(self._files.root).as_posix()
        calls = [
            client.save(run, leader_epoch, f"{directory}/{client.role}", SaveKind.CHECKPOINT, step)
            for client in trained
        ]
        return PendingCheckpoint(self._files, step, partial, manifest, calls, self._keep, self._tag_best)

    def newest(self, run: str, verify: bool = True) -> Checkpoint | None:
        """Return the newest checkpoint whose files match their checksums. Damaged checkpoints are skipped and noted.

        Without ``verify`` only the manifests are read, which is enough if no model is restored.
        """
        for path in reversed(checkpoint_folders(self._files)):
            try:
                checkpoint = read_verified_checkpoint(path) if verify else read_checkpoint(path)
                if checkpoint.run == run:
                    return checkpoint
                problem = f"belongs to run {checkpoint.run}"
            except DamagedCheckpoint as damage:
                problem = str(damage)
            text = f"checkpoint {path} is skipped: {problem}"
            if text not in self._skipped:
                log.warning("checkpoint skipped", path=str(path), problem=problem)
                self._skipped[text] = False
        return None

    def take_skipped(self) -> list[str]:
        """Return a note for each skipped checkpoint that has not been reported yet."""
        new = [text for text, reported in self._skipped.items() if not reported]
        self._skipped |= dict.fromkeys(new, True)
        return new


class PendingCheckpoint:
    """A checkpoint that the services are writing. Without a manifest it is invalid, and the next one removes it."""

    def __init__(
        self,
        files: RunFiles,
        step: int,
        partial: Path,
        manifest: dict[str, Any],
        calls: Sequence[Future[list[SavedFile]]],
        keep: int,
        tag_best: Callable[[], None],
    ) -> None:
        self.step, self._tag_best = step, tag_best
        self._files, self._partial, self._manifest, self._calls, self._keep = files, partial, manifest, calls, keep

    @property
    def calls(self) -> Sequence[Future[list[SavedFile]]]:
        """The save of each model."""
        return self._calls

    def done(self) -> bool:
        """Return whether all saves have ended."""
        return all(call.done() for call in self._calls)

    def finish(self) -> None:
        """Wait for the services, write the manifest, rename the checkpoint, and drop the oldest one.

        Raises the error of a save, StorageFailed if the manifest cannot be written, and MismatchError if the files are not where
        the services report them. Earlier checkpoints are untouched then.
        """
        try:
            wait_for_all(self._calls)
            saved = [file for call in self._calls for file in call.result()]
            check_saved_files(self._files.root, saved)
            self._publish(saved)
        except (ServiceFailed, StorageFailed):
            # A partial checkpoint takes disk space that the next one needs. Another service may still be writing.
            wait(self._calls)
            shutil.rmtree(self._partial, ignore_errors=True)
            raise
        failpoint("orchestrator.checkpointed")
        # The best checkpoint keeps its tag until the better one has it, so it is never dropped.
        self._tag_best()
        self._drop_oldest()

    def abandon(self) -> None:
        """Cancel the saves."""
        for call in self._calls:
            call.cancel()

    def _publish(self, saved: Sequence[SavedFile]) -> None:
        checkpoints = self._files.checkpoints
        final = checkpoints / f"step-{self.step:06d}"
        described = {
            (self._files.root / file.path).relative_to(self._partial).as_posix(): {
                "bytes": file.bytes,
                "sha256": file.sha256,
            }
            for file in saved
        }
        try:
            failpoint("orchestrator.manifest_writing")
            write_durably(self._partial / MANIFEST, json.dumps({**self._manifest, "files": described}, indent=2) + "\n")
            failpoint("orchestrator.manifest_written")
            replaced = checkpoints / f".{final.name}.replaced.partial"
            if final.exists():  # It is damaged: a valid checkpoint is not saved again.
                final.rename(replaced)
            self._partial.rename(final)
            fsync_path(checkpoints)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            if not is_storage_error(error):
                raise
            raise StorageFailed(
                f"checkpoint {final}: cannot be written ({error.strerror}); free space on that disk"
            ) from error

    def _drop_oldest(self) -> None:
        try:
            for path in checkpoint_folders(self._files)[: -self._keep]:
                is_rollback_target = checkpoint_step(path) == rollback_target(self._files)
                if not is_rollback_target and path.name not in tagged_checkpoints(self._files).values():
                    delete_checkpoint(path)
        except OSError as error:
            log.warning("old checkpoint not dropped", error=str(error))
