"""The checkpoints of a run, as they lie on the disk: ``checkpoints/step-000020/`` with a manifest of every file in it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.durable_files import sha256
from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles

FORMAT = 1
"""Version of the manifest."""
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint by its manifest: whose it is, where it lies, the leader's epoch then, what the orchestrator must remember.

    ``roles`` are the models that it must hold; ``files`` are sizes in bytes and SHA-256 by path below ``path``: weights and
    optimizers. All else that a run is follows from ``step``: its place in the data and in the learning rates' schedules, its
    random streams, the policy's version, and the trajectories that it has consumed, which are those of the steps up to it.
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
        """Size of all files."""
        return sum(size for size, _ in self.files.values())

    def holds(self, role: str) -> bool:
        """Whether there are files of this role's model."""
        return any(name.startswith(f"{role}/") for name in self.files)

    def problem(self) -> str | None:
        """What is wrong with its files, or None when all are there with their checksums. Reads every byte."""
        for role in self.roles:
            if not self.holds(role):
                return f"{MANIFEST} names no file of the {role}"
        for name, (size, digest) in self.files.items():
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size or sha256(file) != digest:
                return f"{name} is not as the manifest says"
        return None


class DamagedCheckpoint(Exception):
    """A checkpoint cannot be used; the text says why."""


def checkpoint_folders(files: RunFiles) -> list[Path]:
    """Where checkpoints lie, the oldest first."""
    found = [path for path in files.checkpoints.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=checkpoint_step)


def checkpoint_step(folder: Path) -> int:
    """The step of a checkpoint, by its folder."""
    return int(folder.name.removeprefix("step-"))


def tagged_checkpoints(files: RunFiles) -> dict[str, str]:
    """The names that were given to checkpoints, and the folders that they stand for: ``best -> step-000020``, links."""
    if not files.checkpoints.is_dir():
        return {}
    links = [path for path in sorted(files.checkpoints.iterdir()) if path.is_symlink() and path.name[0] != "."]
    return {path.name: path.readlink().name for path in links}


def delete_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, unless it gets a name meanwhile: at no time is half of one there, or a name without one."""
    files = RunFiles(folder.parents[1])
    # What is called so is removed when the next checkpoint begins, if this process ends before it is gone.
    dropped = folder.with_name(f".{folder.name}.dropped.partial")
    folder.rename(dropped)
    if folder.name in tagged_checkpoints(files).values():
        dropped.rename(folder)
        return
    shutil.rmtree(dropped)


def rollback_target(files: RunFiles) -> int:
    """The step of the checkpoint that a user has asked to go back to, 0 for none."""
    try:
        return int(files.rolling_back.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def checkpoints_after(files: RunFiles, step: int) -> list[Path]:
    """Where the checkpoints lie that going back to ``step`` drops. Raises ConfigError when one of them is named, to be kept."""
    later = [path for path in checkpoint_folders(files) if checkpoint_step(path) > step]
    for name, folder in tagged_checkpoints(files).items():
        if folder in [path.name for path in later]:
            raise ConfigError(
                f"rollback to step {step}: {folder} is tagged {name}; remove the tag with quartet checkpoints untag {files.root} {name} "
                "first, or fork"
            )
    return later


def roll_back(files: RunFiles, step: int) -> None:
    """Forgets what came after a checkpoint's step: later checkpoints, changes, metrics, trajectories, the saved policy.

    Whoever is asked for it by ``rolling_back`` ends what a crash broke off. Raises ConfigError when a later checkpoint is named.
    """
    for path in checkpoints_after(files, step):
        delete_checkpoint(path)
    for result in (files.policy, files.adapter):
        shutil.rmtree(result, ignore_errors=True)
    # Before the steps that they are for: otherwise a crash between the two would leave them to other steps.
    files.truncate_changes_after(step)
    files.truncate_after(step)
    files.rolling_back.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by its manifest; its files are not looked at. Raises DamagedCheckpoint."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(about["bytes"]), str(about["sha256"])) for name, about in manifest["files"].items()}
        found = Checkpoint(
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
    return found


def read_verified_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint of which every file is there with its checksum. Raises DamagedCheckpoint."""
    found = read_checkpoint(path)
    problem = found.problem()
    if problem is not None:
        raise DamagedCheckpoint(problem)
    return found
