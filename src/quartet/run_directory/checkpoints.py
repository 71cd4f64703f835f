"""The checkpoints of a run on disk: ``checkpoints/step-000020/``, each with a manifest of its files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles
from quartet.system.durable_files import sha256

FORMAT = 1
"""Version of the manifest."""
MANIFEST = "manifest.json"
BEST = "best"
"""Tag of the best checkpoint by ``checkpoint.best_metric``. The run sets it, and a rollback may remove it."""
_FOLDER = re.compile(r"step-\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as described by its manifest. ``state`` is the orchestrator's.

    ``roles`` are the models that it must contain. ``files`` gives size in bytes and SHA-256 by path below ``path``: weights and
    optimizers. Everything else follows from ``step``: the position in the data and in the learning rate schedules, the random
    streams, the policy version, and the consumed trajectories, which are those of the steps up to it.
    """

    run: str
    step: int
    path: Path
    leader_epoch: int
    state: dict[str, Any]
    roles: tuple[str, ...]
    files: dict[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(size for size, _ in self.files.values())

    def holds(self, role: str) -> bool:
        """Return whether the checkpoint contains files of this role's model."""
        return any(name.startswith(f"{role}/") for name in self.files)

    def problem(self) -> str | None:
        """Return the problem with the files, or None if all match the manifest. Reads every byte."""
        for role in self.roles:
            if not self.holds(role):
                return f"{MANIFEST} names no file of the {role}"
        for name, (size, digest) in self.files.items():
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size or sha256(file) != digest:
                return f"{name} does not match the manifest"
        return None


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be used. The message says why."""


def checkpoint_folders(files: RunFiles) -> list[Path]:
    """Return the folders of all checkpoints, oldest first."""
    folders = [path for path in files.checkpoints.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """Return the step of a checkpoint, by its folder."""
    return int(folder.name.removeprefix("step-"))


def tagged_checkpoints(files: RunFiles) -> dict[str, str]:
    """Return the folder of each tag. A tag is a link, such as ``best -> step-000020``."""
    if not files.checkpoints.is_dir():
        return {}
    links = [path for path in sorted(files.checkpoints.iterdir()) if path.is_symlink() and path.name[0] != "."]
    return {path.name: path.readlink().name for path in links}


def delete_checkpoint(folder: Path) -> None:
    """Delete a checkpoint atomically, unless it has been tagged. A tag never points to a deleted checkpoint."""
    files = RunFiles(folder.parents[1])
    # If this process ends before the deletion does, the start of the next checkpoint removes folders with such names.
    dropped = folder.with_name(f".{folder.name}.dropped.partial")
    folder.rename(dropped)
    if folder.name in tagged_checkpoints(files).values():
        dropped.rename(folder)
        return
    shutil.rmtree(dropped)


def rollback_target(files: RunFiles) -> int:
    """Return the step of the checkpoint that a user requested a rollback to, 0 for none."""
    try:
        return int(files.rolling_back.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def checkpoints_after(files: RunFiles, step: int) -> list[Path]:
    """Return the checkpoints that a rollback to ``step`` deletes. Raises ConfigError if a user has tagged one of them."""
    later = [path for path in checkpoint_folders(files) if checkpoint_step(path) > step]
    for name, folder in tagged_checkpoints(files).items():
        if name != BEST and folder in [path.name for path in later]:
            raise ConfigError(
                f"rollback to step {step}: {folder} is tagged {name}; remove the tag with quartet checkpoints untag "
                f"{files.root} {name} first, or fork"
            )
    return later


def roll_back(files: RunFiles, step: int) -> None:
    """Delete everything after a checkpoint's step: later checkpoints, changes, metrics, trajectories, the saved policy
    unless it is that of ``step``.

    The file ``rolling_back`` is removed last, so that a rollback that a crash interrupted is completed later. Raises ConfigError
    if a later checkpoint is tagged.
    """
    later = checkpoints_after(files, step)
    if tagged_checkpoints(files).get(BEST) in [path.name for path in later]:
        (files.checkpoints / BEST).unlink(missing_ok=True)
    for path in later:
        delete_checkpoint(path)
    # A policy that was saved at this very step stays.
    if files.policy_step() != step:
        files.policy_record.unlink(missing_ok=True)
        for result in (files.policy, files.adapter, files.policy_ema):
            shutil.rmtree(result, ignore_errors=True)
    # Before the steps that they belong to: otherwise a crash in between would apply them to recomputed steps.
    files.truncate_changes_after(step)
    files.truncate_after(step)
    files.rolling_back.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest, without checking its files. Raises DamagedCheckpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in manifest["files"].items()}
        checkpoint = Checkpoint(
            str(manifest["run"]),
            int(manifest["step"]),
            path,
            int(manifest["leader_epoch"]),
            dict(manifest["state"]),
            tuple(map(str, manifest["roles"])),
            files,
        )
        version = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} cannot be used ({type(error).__name__})") from None
    if version != FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST} has format {version}, expected {FORMAT}")
    return checkpoint


def read_verified_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every file against the manifest. Raises DamagedCheckpoint."""
    checkpoint = read_checkpoint(path)
    problem = checkpoint.problem()
    if problem is not None:
        raise DamagedCheckpoint(problem)
    return checkpoint
