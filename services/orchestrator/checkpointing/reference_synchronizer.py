"""Synchronization of the reference with the policy: every few steps, reference <- alpha policy + (1 - alpha) reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from quartet.contract.status import Role
from quartet.contract.weights import ReferenceVersion, SaveKind
from quartet.errors import ConfigError, StorageFailed
from quartet.models.weights.mixing import write_mixed
from quartet.run_directory.checkpoints import checkpoint_folders, checkpoint_step
from quartet.run_directory.reference_versions import (
    read_version,
    remove_versions,
    version_folder,
    versions,
    write_record,
)
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.service_clients import wait_for_all
from quartet.system.durable_files import check_saved_files, is_storage_error, replace_directory, storage_errors

log = structlog.get_logger()


class ReferenceSynchronizer:
    """Writer of the reference's versions, each a folder of the run. Scoring names the version, and the service loads it.

    A step is scored by the version after the last multiple of ``reference.sync_steps`` before it, so the version is a function of
    the step only. It is on the disk before the step is scored. So a step that is recomputed or replayed later has its version.
    """

    def __init__(self, run: RunContext) -> None:
        self._config, self._files, self._clients, self._profiler = run.config, run.files, run.clients, run.profiler
        self._every = run.config.reference.sync_steps
        self._current: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the reference changes after ``step``."""
        return self._every is not None and step % self._every == 0

    def synchronize(self, step: int, leader_epoch: int, check_lease: Callable[[], None]) -> None:
        """Bring the reference to the version that scores the step after ``step``. The policy has taken ``step`` updates.

        Has no effect if it is there. ``check_lease`` is called before a new version is installed. Raises its error,
        StorageFailed, the error of the actor's save, and ConfigError if a version is missing that only an earlier policy could
        make.
        """
        if self._every is None:
            return
        newest = step - step % self._every
        if newest == self._current:
            return
        version = self._read(newest)
        if version is None:
            if newest != step:
                folder = version_folder(self._files.references, newest)
                raise ConfigError(
                    f"reference {folder}: is missing; put the folder back, roll back to a checkpoint of step {newest} or "
                    "before it, or start a new run"
                )
            version = self._create(step, leader_epoch, check_lease)
        # Also version 0, so that a service that cannot read versions fails at the first step.
        self._clients.reference_version = version
        self._current = newest
        self._remove_unneeded(newest)

    def _read(self, step: int) -> ReferenceVersion | None:
        return read_version(self._files.root, self._files.references, step)

    def _create(self, step: int, leader_epoch: int, check_lease: Callable[[], None]) -> ReferenceVersion:
        references, before = self._files.references, step - (self._every or 0)
        old = version_folder(references, before) if step else None
        if step and self._read(before) is None:
            raise ConfigError(f"reference {old}: is missing; put the folder back, or start a new run")
        with self._profiler.span(Role.ORCHESTRATOR, "synchronize", waits=True):
            policy = self._save_policy(step, leader_epoch)
            with storage_errors(references):
                self._write(policy, old, version_folder(references, step), check_lease)
                shutil.rmtree(policy)
        version = self._read(step)
        assert version is not None
        log.info("reference synchronized", step=step, digest=version.digest.hex())
        return version

    def _save_policy(self, step: int, leader_epoch: int) -> Path:
        """Let the actor save its policy below the folder of the versions, and return the folder."""
        references = self._files.references
        # Temporary directories of the actor have another dot.
        for leftover in references.glob(".*step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # Another epoch's save may still be in progress.
        path = references / f".step-{step:06d}.{leader_epoch}.policy"
        directory = path.relative_to(self._files.root).as_posix()
        call = self._clients.actor.save(self._config.run.name, leader_epoch, directory, SaveKind.MODEL, step)
        wait_for_all([call])
        check_saved_files(self._files.root, call.result())
        return path

    def _write(self, policy: Path, old: Path | None, target: Path, check_lease: Callable[[], None]) -> None:
        def fill(fresh: Path) -> None:
            write_mixed(policy, old, self._config.reference.sync_alpha, fresh)
            write_record(fresh)
            check_lease()

        try:
            replace_directory(target, fill)
        except Exception as error:  # safetensors raises its own error
            if isinstance(error, OSError) or not is_storage_error(error):
                raise
            raise StorageFailed(f"reference {target}: cannot be written: {error}; free space, then --resume") from error

    def _remove_unneeded(self, newest: int) -> None:
        """Remove the versions with which no recovery, rollback or fork continues.

        They continue from a checkpoint, whose version was written before it, or from a step after the newest checkpoint, whose
        experience the buffer holds. Without regular checkpoints, the buffer drops the experience of each step.
        """
        every = self._every
        assert every is not None
        checkpoints = {checkpoint_step(folder) for folder in checkpoint_folders(self._files)}
        kept = {step - step % every for step in checkpoints | {newest}}
        newest_start = max(checkpoints, default=0) if self._config.checkpoint.every_steps else newest
        first_replayed = newest_start - newest_start % every
        unneeded = [step for step in versions(self._files.references) if step not in kept and step < first_replayed]
        try:
            remove_versions(self._files.references, unneeded)
        except OSError as error:
            log.warning("old version of the reference not removed", error=str(error))
