"""Folders that all workers of a test session share: the first that needs one creates it, and the others wait."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, create: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` of the session, which ``create`` has filled. Tests must not change it."""
    base = factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            create(folder)
            done.touch()
    return folder
