"""Paths confined to a root, and what was written below them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePosixPath

from quartet.errors import InvalidRequest
from quartet.types import SavedFile


def confined(root: Path, relative: str) -> Path:
    """``root / relative``. Raises InvalidRequest unless that lies below the root, also through links."""
    path = PurePosixPath(relative)
    # The root itself is refused too: what is saved there would take the place of the whole run.
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in relative or "\0" in relative:
        raise InvalidRequest(f"directory {relative!r}: expected a path below the run's directory, such as policy")
    target = root / path
    if root.resolve() not in target.resolve().parents:
        raise InvalidRequest(f"directory {relative!r}: leaves the run's directory")
    return target


def describe_files(root: Path, directory: Path) -> list[SavedFile]:
    """Every file below ``directory``, by path relative to ``root``, in order."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [SavedFile(file.relative_to(root).as_posix(), file.stat().st_size, sha256(file)) for file in files]


def sha256(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Writes a file aside, flushes it to the disk, and renames it: a reader sees the old text or the new, whole."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
