"""Paths confined to a root directory, descriptions of saved files, and atomic durable writes."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from quartet.contract.weights import SavedFile
from quartet.errors import InvalidRequest, MismatchError, StorageFailed

MAX_NAME, MAX_PATH = 200, 1000
"""Maximum bytes of a name and of a path in a request. File systems allow more, because suffixes are added."""

_STORAGE_ERRNOS = frozenset(
    (
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV),
    )
)


def is_storage_error(error: Exception) -> bool:
    """Return whether a full, read-only, forbidden or failing disk caused the error. Any other error of a save is a bug.

    safetensors and tokenizers raise other exceptions, with the errno of the OSError in the text.
    """
    if isinstance(error, OSError):
        return error.errno in _STORAGE_ERRNOS
    wrapped = re.search(r"\(os error (\d+)\)", str(error))
    return wrapped is not None and int(wrapped[1]) in _STORAGE_ERRNOS


def describe_os_error(error: OSError) -> str:
    """Return an error message for the user who gave the path."""
    what = f"{error.filename or 'system'}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{what}; give user {os.getuid()} access, for example with chmod -R a+rX, or give another path"
    return f"{what}; give another path"


def confine_path(root: Path, relative: str) -> Path:
    """Return ``root / relative``. Raises InvalidRequest if that is outside the root, also through links, or is a file."""
    path = PurePosixPath(relative)
    # The root itself is refused too: a save there would replace the whole run.
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in relative or "\0" in relative:
        raise InvalidRequest(f"directory {relative!r}: expected a path below the run's directory, such as policy")
    if len(relative.encode()) > MAX_PATH or max(len(part.encode()) for part in path.parts) > MAX_NAME:
        raise InvalidRequest(
            f"directory of {len(relative)} characters: expected at most {MAX_PATH} bytes, {MAX_NAME} in each name"
        )
    target = root / path
    if root.resolve() not in target.resolve().parents:
        raise InvalidRequest(f"directory {relative!r}: is outside the run's directory")
    for ancestor in (target, *target.parents[: len(path.parts) - 1]):
        if ancestor.exists() and not ancestor.is_dir():
            raise InvalidRequest(f"directory {relative!r}: {ancestor.relative_to(root)} is a file")
    return target


def checkpoint_path(root: Path, step: int, directory: str) -> Path | None:
    """Return the directory of a checkpoint to restore, or None for step 0. Raises InvalidRequest."""
    if (step == 0) != (directory == ""):
        raise InvalidRequest(f"restore of step {step}: expected a directory, or none for step 0, got {directory!r}")
    return confine_path(root, directory) if directory else None


def describe_files(root: Path, directory: Path) -> list[SavedFile]:
    """Return every file below ``directory``, sorted, with its path relative to ``root``."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [SavedFile(file.relative_to(root).as_posix(), file.stat().st_size, sha256(file)) for file in files]


def check_saved_files(root: Path, files: Sequence[SavedFile]) -> None:
    """Raise MismatchError if a file that a service reports is not below ``root`` on this machine."""
    for file in files:
        path = root / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise MismatchError(
                f"saved file {path}: missing, or not as the service reported it; "
                "run.directory must be a path that orchestrator, actor and critic share"
            )


def sha256(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Translate OSError to StorageFailed while a file of a run is written."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(
            f"{path}: cannot be written ({error.strerror}); fix that, then continue with --resume"
        ) from error


def write_durably(path: Path, text: str) -> None:
    """Write a temporary file, flush it to the disk, and rename it. A reader sees the old or the new text. Raises OSError."""
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
    """Append to a file and flush it to the disk. Raises OSError, with nothing appended, if that fails."""
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
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(directory: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary directory, flush it to the disk, and rename it to ``directory``.

    A reader sees the complete old or new directory, or for a moment none.
    """
    try:
        fresh = create_replacement(directory)
        write(fresh)
        install_replacement(directory)
    finally:
        remove_replacement(directory)


def create_replacement(directory: Path) -> Path:
    """Return a new temporary directory, which ``install_replacement`` renames to ``directory``. Raises OSError."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    remove_replacement(directory)
    fresh = temporary_directory(directory)
    fresh.mkdir()
    return fresh


def install_replacement(directory: Path) -> None:
    """Flush the temporary directory of ``create_replacement`` to the disk and rename it to ``directory``. Raises OSError."""
    fresh, old = temporary_directory(directory), _replaced(directory)
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
    shutil.rmtree(old, ignore_errors=True)


def remove_replacement(directory: Path) -> None:
    """Remove the temporary directories of ``directory``, if there are any."""
    for path in (temporary_directory(directory), _replaced(directory)):
        shutil.rmtree(path, ignore_errors=True)


def temporary_directory(directory: Path) -> Path:
    """Return the path of the temporary directory of ``create_replacement``."""
    return directory.with_name(f".{directory.name}.writing")


def _replaced(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory beside ``target``. Rename it to ``target`` on a normal exit, and remove it after an error.

    An existing directory at ``target`` is replaced. Raises OSError if ``target`` cannot be written.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        staging, replaced = workplace / "new", workplace / "old"
        staging.mkdir()
        yield staging
        if target.exists():
            os.rename(target, replaced)
        try:
            os.rename(staging, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
