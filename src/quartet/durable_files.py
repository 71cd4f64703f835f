"""Paths confined to a root, what was written below them, and writes that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from quartet.errors import InvalidRequest, MismatchError, StorageFailed
from quartet.types import SavedFile

MAX_NAME, MAX_PATH = 200, 1000
"""Bytes of a path and of each of its parts that a caller may give: less than what file systems take, as more is added to it."""


def describe_os_error(error: OSError) -> str:
    """What the system refused, for whoever gave the path."""
    what = f"{error.filename or 'system'}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{what}; let user {os.getuid()} in, as chmod -R a+rX does for reading, or give another path"
    return f"{what}; give another path"


def confine_path(root: Path, relative: str) -> Path:
    """``root / relative``. Raises InvalidRequest unless that lies below the root, also through links, and may be a directory."""
    path = PurePosixPath(relative)
    # The root itself is refused too: what is saved there would take the place of the whole run.
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in relative or "\0" in relative:
        raise InvalidRequest(f"directory {relative!r}: expected a path below the run's directory, such as policy")
    if len(relative.encode()) > MAX_PATH or max(len(part.encode()) for part in path.parts) > MAX_NAME:
        raise InvalidRequest(
            f"directory of {len(relative)} characters: expected at most {MAX_PATH} bytes, {MAX_NAME} in each name"
        )
    target = root / path
    if root.resolve() not in target.resolve().parents:
        raise InvalidRequest(f"directory {relative!r}: leaves the run's directory")
    for place in (target, *target.parents[: len(path.parts) - 1]):
        if place.exists() and not place.is_dir():
            raise InvalidRequest(f"directory {relative!r}: {place.relative_to(root)} is a file")
    return target


def checkpoint_path(root: Path, step: int, directory: str) -> Path | None:
    """Where a model is to go back to: below ``root``, or None for step 0. Raises InvalidRequest."""
    if (step == 0) != (directory == ""):
        raise InvalidRequest(f"restore of step {step}: expected a directory, and none for step 0, not {directory!r}")
    return confine_path(root, directory) if directory else None


def describe_files(root: Path, directory: Path) -> list[SavedFile]:
    """Every file below ``directory``, by path relative to ``root``, in order."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [SavedFile(file.relative_to(root).as_posix(), file.stat().st_size, sha256(file)) for file in files]


def check_saved_files(root: Path, files: Sequence[SavedFile]) -> None:
    """Raises MismatchError unless the files that a service reports lie below ``root`` here, too."""
    for file in files:
        path = root / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise MismatchError(
                f"saved file {path}: not there as the service reported it; "
                "run.directory must be a path that orchestrator, actor and critic share"
            )


def sha256(path: Path) -> str:
    """The file's SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Around the writing of a run's file: what the disk refuses is StorageFailed."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{path}: cannot be written ({error.strerror}); mend that, then go on with --resume"
        ) from error


def write_durably(path: Path, text: str) -> None:
    """Writes a file aside, flushes it to the disk, and renames it: a reader sees the old text or the new, whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def append_durably(path: Path, text: str) -> None:
    """Adds to a file and flushes it to the disk. Raises OSError where that fails, with nothing of it added."""
    with path.open("ab", buffering=0) as file:
        end, rest = file.tell(), memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
    if end == 0:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Waits until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a sibling of ``directory`` and renames it into place, on disk before it is visible.

    A reader sees the old directory, for an instant none, or the whole new one, never half of it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (directory.with_name(f".{directory.name}.{tag}") for tag in ("writing", "replaced"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        fresh.mkdir()
        write(fresh)
        for path in [*fresh.rglob("*"), fresh]:
            fsync_path(path)
        if directory.exists():
            directory.rename(old)
        try:
            fresh.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
        fsync_path(directory.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
