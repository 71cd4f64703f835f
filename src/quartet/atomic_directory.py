"""Atomic creation of directories: they are built beside their target, and renamed to it when they are complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
