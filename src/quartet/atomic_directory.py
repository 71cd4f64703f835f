"""Directories that appear whole or not at all: built beside their place, then renamed into it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """An empty sibling of ``target`` to build in. Takes ``target``'s place on a normal exit, and is removed on any other.

    A directory that stands at ``target`` is replaced. Raises OSError where the place cannot be written.
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
