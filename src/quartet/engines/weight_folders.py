"""Folders with weights that an engine or a server reads. None outlives its process for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

import structlog

log = structlog.get_logger()

_LOCK = ".quartet-lock"
"""File in each folder. The owner holds an flock on it until it ends, however it ends."""


class OwnedFolder:
    """A folder of this process. At its creation, those of processes that have ended are deleted from the same directory.

    Processes on several machines may share the directory, if its file system keeps locks for all of them, as NFS does by default.
    """

    def __init__(self, directory: Path, prefix: str, mode: int = 0o777) -> None:
        """Create ``directory``/``prefix`` + a random name. ``mode``: access to the folder, less the umask. Raises OSError."""
        directory = directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(directory, prefix)
        self.path = directory / f"{prefix}{uuid.uuid4().hex[:12]}"
        self.path.mkdir(mode=mode)
        # The file gets its name when it is locked, so that no other process takes this folder for abandoned.
        unlocked = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self.path / _LOCK)
        except OSError as error:
            # Without the file no process deletes the folder, except this one.
            log.warning(
                "no file locks; after a hard end, delete the folder by hand", folder=str(self.path), error=str(error)
            )

    def close(self) -> None:
        """Delete the folder. May be called again."""
        if self._descriptor >= 0:
            _delete(self.path)
            os.close(self._descriptor)
            self._descriptor = -1


class WeightFolders:
    """Folders with the present policy version, in a directory that the server sees under the same path."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._owned: OwnedFolder | None = None

    def replaced(self, name: str) -> Path:
        """Return the path of a folder that does not exist yet. Deletes an earlier folder of this name."""
        if self._owned is None:
            self._owned = OwnedFolder(self._directory, "quartet-")
        folder = self._owned.path / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def keep(self, folder: Path) -> None:
        """Delete every folder except this one."""
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir():
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None


def _delete_abandoned(directory: Path, prefix: str) -> None:
    """Delete the folders of this prefix whose owner has ended. Others, and those of other users, stay."""
    for lock in directory.glob(f"{prefix}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # It is another user's, or another process has deleted it.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(lock.parent)
            log.info("weights of a process that has ended were deleted", folder=str(lock.parent))
        except OSError:
            continue  # Its owner is alive.
        finally:
            os.close(descriptor)


def _delete(folder: Path) -> None:
    """Delete a folder, the lock last: if this process ends in between, the next one deletes the rest."""
    for entry in folder.glob("*"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != _LOCK:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
