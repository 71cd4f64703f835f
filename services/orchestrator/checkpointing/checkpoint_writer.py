"""Checkpoints: the trained models and all else that the run is, written aside, renamed when whole, the manifest last."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from quartet import __version__
from quartet.durable_files import check_saved, flush, write_durably
from quartet.errors import ServiceFailed, StorageFailed
from quartet.failpoints import failpoint
from quartet.rpc.clients import ActorClient, CriticClient, PendingResult
from quartet.run_directory.checkpoints import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    drop_checkpoint,
    named_checkpoints,
    read_checkpoint,
    step_of,
    step_to_go_back_to,
    whole_checkpoint,
)
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.rollout.collector import POLL, wait_for_all
from quartet.types import SavedFile, SaveKind

log = structlog.get_logger()


class Checkpoints:
    """The checkpoints of one run: ``checkpoints/step-000020/{actor,critic}/`` and their ``manifest.json``."""

    def __init__(self, files: RunFiles, keep: int, config_yaml: str) -> None:
        self._files, self._keep = files, keep
        self._problems: dict[str, bool] = {}
        self._config_hash = hashlib.sha256(config_yaml.encode()).hexdigest()

    def begin(
        self,
        run: str,
        step: int,
        leader_epoch: int,
        trained: Sequence[ActorClient | CriticClient],
        state: dict[str, Any],
    ) -> PendingCheckpoint:
        """Begins to save the trained models as they are after ``step``; ``state`` is what the orchestrator itself must remember.

        They go on meanwhile, but must not be updated before ``finish``: a save that comes too late is refused.
        """
        name = f"step-{step:06d}"
        # A former leader's saves may still be under way, and a later one's may have begun.
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
        return PendingCheckpoint(self._files, step, partial, manifest, calls, self._keep)

    def newest(self, run: str, verify: bool = True) -> Checkpoint | None:
        """The newest checkpoint whose files are all there with their checksums; what is damaged is passed over, and said.

        Without ``verify`` only the manifests are read: enough where no model is restored.
        """
        for path in reversed(checkpoint_folders(self._files)):
            try:
                found = whole_checkpoint(path) if verify else read_checkpoint(path)
                if found.run == run:
                    return found
                problem = f"is of run {found.run}"
            except DamagedCheckpoint as damage:
                problem = str(damage)
            text = f"checkpoint {path} is passed over: {problem}"
            if text not in self._problems:
                log.warning("checkpoint passed over", path=str(path), problem=problem)
                self._problems[text] = False
        return None

    def passed_over(self) -> list[str]:
        """Why checkpoints were passed over: what has not been asked for yet."""
        fresh = [text for text, told in self._problems.items() if not told]
        self._problems |= dict.fromkeys(fresh, True)
        return fresh


class PendingCheckpoint:
    """A checkpoint that the services are writing. Without its manifest it is none, and goes when the next one begins."""

    def __init__(
        self,
        files: RunFiles,
        step: int,
        partial: Path,
        manifest: dict[str, Any],
        calls: Sequence[PendingResult[list[SavedFile]]],
        keep: int,
    ) -> None:
        self.step = step
        self._files, self._partial, self._manifest, self._calls, self._keep = files, partial, manifest, calls, keep

    @property
    def calls(self) -> Sequence[PendingResult[list[SavedFile]]]:
        """The services' parts, in the order of the models."""
        return self._calls

    def done(self) -> bool:
        """Whether the services have ended their part."""
        return all(call.done() for call in self._calls)

    def finish(self) -> None:
        """Waits for the services, writes the manifest, gives the checkpoint its name, and drops the oldest.

        Raises what a save failed with, StorageFailed when the manifest cannot be written, MismatchError when the files are not
        where the services say. The checkpoints before it are then untouched.
        """
        try:
            wait_for_all(self._calls)
            saved = [file for call in self._calls for file in call.result()]
            check_saved(self._files.root, saved)
            self._publish(saved)
        except (ServiceFailed, StorageFailed):
            # What is half there takes room that is needed. The other service may be writing still.
            while not self.done():
                time.sleep(POLL)
            shutil.rmtree(self._partial, ignore_errors=True)
            raise
        failpoint("orchestrator.checkpointed")
        self._drop_oldest()

    def abandon(self) -> None:
        """Tells the services that nobody waits any more."""
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
            if final.exists():  # Damaged: otherwise the run would not have come to this step again.
                final.rename(replaced)
            self._partial.rename(final)
            flush(checkpoints)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise StorageFailed(
                f"checkpoint {final}: cannot be written ({error.strerror}); free space on that disk"
            ) from error

    def _drop_oldest(self) -> None:
        try:
            for path in checkpoint_folders(self._files)[: -self._keep]:
                wanted = step_of(path) == step_to_go_back_to(self._files)
                if not wanted and path.name not in named_checkpoints(self._files).values():
                    drop_checkpoint(path)
        except OSError as error:
            log.warning("an old checkpoint stays", error=str(error))
