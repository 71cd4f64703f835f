"""Lock a run directory, replace an earlier run in it, remove a run from it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from shlex import quote

from quartet.errors import ConfigError
from quartet.run_directory.run_files import RunFiles


@contextmanager
def lock_folder(folder: Path, name: str, in_use: str) -> Iterator[None]:
    """Create the folder and lock it for this process. ``name`` is what messages call it.

    Raises ConfigError with ``in_use`` if another process holds the lock, and for a folder that cannot be written or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"{name} {folder}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{name} {folder}: {in_use}") from None
        except OSError as error:
            raise ConfigError(
                f"{name} {folder}: cannot be locked ({error.strerror}); set run.directory to a folder on a file system that "
                "supports flock"
            ) from None
        yield


ACTIVE_STAGE = (
    "a stage is active there; it takes no commands: end it with Ctrl-C (or SIGTERM), and --resume continues it"
)
"""What a command says that an active stage cannot follow."""


def lock_run_directory(files: RunFiles) -> AbstractContextManager[None]:
    """Create the directory and lock it for one run. Raises ConfigError if another run holds the lock."""
    in_use = (
        ACTIVE_STAGE
        if files.stage_name()
        else f"a run is active there; wait until it ends, stop it with quartet stop {quote(str(files.root))}, or choose "
        "another run.name"
    )
    return lock_folder(files.root, "run directory", in_use)


def is_locked(files: RunFiles) -> bool:
    """Return whether a process runs in the directory."""
    try:
        with (files.root / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def is_used(files: RunFiles) -> bool:
    """Return whether a run has left its files here."""
    # A run without a step may be replaced. A stage begins with its identity, and its steps follow later.
    has_stage = files.identity.exists() and files.stage_name() is not None
    return files.metrics.exists() or files.policy.exists() or has_stage


def check_unused(files: RunFiles) -> None:
    """Raise ConfigError if a run has left its files here."""
    if is_used(files):
        raise ConfigError(
            f"run directory {files.root}: holds an earlier run; use --resume to continue it, --overwrite to replace it, "
            "or choose another run.name"
        )


def move_earlier_run_aside(files: RunFiles) -> None:
    """Move an earlier run to a hidden folder, until ``restore_earlier_run`` or ``delete_earlier_run``.

    Raises ConfigError if the files there do not belong to a run of Quartet.
    """
    existing = [path for path in files.all_paths() if path.exists()]
    if existing and not files.is_run():
        raise ConfigError(
            f"--overwrite: {existing[0]} does not belong to a run of Quartet; choose another run.name, or move it away"
        )
    shutil.rmtree(files.earlier, ignore_errors=True)
    files.earlier.mkdir()
    for path in existing:
        path.rename(files.earlier / path.name)


def restore_earlier_run(files: RunFiles) -> None:
    """Restore the run that ``move_earlier_run_aside`` moved, and remove later files. Does nothing without such a run."""
    if not files.earlier.exists():
        return
    for path in files.all_paths():
        _remove(path)
    for path in files.earlier.iterdir():
        path.rename(files.root / path.name)
    files.earlier.rmdir()


def delete_earlier_run(files: RunFiles) -> None:
    """Delete the run that ``move_earlier_run_aside`` moved."""
    shutil.rmtree(files.earlier, ignore_errors=True)


def remove_run(files: RunFiles) -> None:
    """Remove the files of a run, and no others. For a run that took no step, before a new one uses the directory."""
    if files.is_run():
        for path in files.all_paths():
            _remove(path)


def find_run(path: Path) -> RunFiles | None:
    """Return the innermost run whose directory contains ``path``, or None."""
    for folder in path.absolute().parents:
        files = RunFiles(folder)
        if files.is_run():
            return files
    return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
