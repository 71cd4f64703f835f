"""The versions of a synchronized reference: ``reference/step-000020/``, a model in float32 with a record of its digest."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from quartet.contract.weights import ReferenceVersion
from quartet.errors import ConfigError
from quartet.system.durable_files import describe_files

RECORD = "reference.json"
"""File with the digest of all others, written last."""


def version_folder(references: Path, step: int) -> Path:
    """Return the folder of the version after ``step``."""
    return references / f"step-{step:06d}"


def files_digest(folder: Path) -> bytes:
    """Return a digest of the names and contents of a version's files, 32 bytes: SHA-256 over the lines "SHA-256 NAME"."""
    lines = [f"{file.sha256} {file.path}\n" for file in describe_files(folder, folder) if file.path != RECORD]
    return hashlib.sha256("".join(lines).encode()).digest()


def write_record(folder: Path) -> None:
    """Record the digest of a complete version."""
    (folder / RECORD).write_text(json.dumps({"sha256": files_digest(folder).hex()}) + "\n", encoding="utf-8")


def read_version(root: Path, references: Path, step: int) -> ReferenceVersion | None:
    """Return the version after ``step``, or None if it does not exist. ``root``: the run's directory.

    Raises ConfigError if its record cannot be read.
    """
    folder = version_folder(references, step)
    if not folder.is_dir():
        return None
    try:
        digest = bytes.fromhex(json.loads((folder / RECORD).read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"reference {folder / RECORD}: cannot be read; roll back to an earlier checkpoint, or start a new run"
        ) from None
    return ReferenceVersion(step, folder.relative_to(root).as_posix(), digest)


def versions(references: Path) -> dict[int, Path]:
    """Return the folder of each version, by its step."""
    folders = {path.name.removeprefix("step-"): path for path in references.glob("step-*") if path.is_dir()}
    return {int(step): path for step, path in sorted(folders.items()) if step.isdecimal()}


def remove_versions(references: Path, steps: Iterable[int]) -> None:
    """Remove versions, by their steps. Raises OSError."""
    existing = versions(references)
    for step in steps:
        # Renamed first: a version that a crash removes in part must not look complete.
        removed = references / f".step-{step:06d}.removed"
        shutil.rmtree(removed, ignore_errors=True)
        existing[step].rename(removed)
        shutil.rmtree(removed)
