"""Checkpoints: the trained models and all else that the run is, written aside, renamed when whole, the manifest last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from typing import Any

import structlog

from quartet.checkpoints import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_folders,
    whole_checkpoint,
)
from quartet.files import check_saved, flush, write_durably
from quartet.rpc.clients import ActorClient, CriticClient
from quartet.telemetry.run_files import RunFiles
from quartet.types import SaveKind
from services.orchestrator.collector import wait_for_all

log = structlog.get_logger()


class Checkpoints:
    """The checkpoints of one run: ``checkpoints/step-000020/{actor,critic}/`` and their ``manifest.json``."""

    def __init__(self, files: RunFiles, keep: int, config_yaml: str) -> None:
        self._files, self._keep = files, keep
        self._config_hash = hashlib.sha256(config_yaml.encode()).hexdigest()

    def save(
        self,
        run: str,
        step: int,
        leader_epoch: int,
        trained: Sequence[ActorClient | CriticClient],
        state: dict[str, Any],
    ) -> None:
        """Saves the trained models and ``state`` (what the orchestrator itself must remember), then drops the oldest."""
        name = f"step-{step:06d}"
        partial = self._files.checkpoints / f".{name}.partial"
        final = self._files.checkpoints / name
        for leftover in (*self._files.checkpoints.glob(".step-*.partial"), final):
            shutil.rmtree(leftover, ignore_errors=True)
        relative = partial.relative_to(self._files.root).as_posix()
        calls = [client.save(run, leader_epoch, f"{relative}/{client.role}", SaveKind.CHECKPOINT) for client in trained]
        wait_for_all(calls)
        saved = [file for call in calls for file in call.result()]
        check_saved(self._files.root, saved)
        manifest = {
            "format": FORMAT,
            "run": run,
            "step": step,
            "leader_epoch": leader_epoch,
            "config_sha256": self._config_hash,
            "state": state,
            "files": {
                file.path.removeprefix(f"{relative}/"): {"bytes": file.bytes, "sha256": file.sha256} for file in saved
            },
        }
        write_durably(partial / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        partial.rename(final)
        flush(self._files.checkpoints)
        self._drop_oldest()

    def newest(self, run: str) -> Checkpoint | None:
        """The newest checkpoint whose files are all there with their checksums; what is damaged is passed over, and said."""
        for path in reversed(checkpoint_folders(self._files)):
            try:
                found = whole_checkpoint(path)
                if found.run == run:
                    return found
                problem = f"is of run {found.run}"
            except DamagedCheckpoint as damage:
                problem = str(damage)
            log.warning("checkpoint passed over", path=str(path), problem=problem)
        return None

    def _drop_oldest(self) -> None:
        for path in checkpoint_folders(self._files)[: -self._keep]:
            shutil.rmtree(path)
