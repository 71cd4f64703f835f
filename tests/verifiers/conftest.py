"""A sandbox for the tests, if this machine has one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from quartet.verifiers.errors import SandboxFailed
from quartet.verifiers.sandbox import bubblewrap
from quartet.verifiers.sandbox.bubblewrap import UNPRIVILEGED
from quartet.verifiers.sandbox.process import START_SCRIPT, Sandbox
from quartet.verifiers.sandbox.selection import open_sandbox

MARKER = f"quartet-test-{uuid.uuid4().hex}"
"""Part of the command line of every process that these tests start in a sandbox."""


def leftovers() -> list[str]:
    """Return the command lines of the processes of sandboxes that still run."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if MARKER in line and path.parent.name != str(os.getpid()):
            lines.append(line[:80])
    return lines


def mounts() -> set[str]:
    """Return the mount points of this process, without those of container engines, which come and go by themselves."""
    points = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return {point for point in points if not point.startswith(("/var/lib/docker/", "/var/lib/containers/", "/run/"))}


def files() -> set[Path]:
    """Return the files of the sandboxes' user in the folders that every user may write to. Only root's sandboxes have a user."""
    folders = [
        folder for folder in map(Path, ("/tmp", "/var/tmp", "/dev/shm")) if folder.is_dir() and os.geteuid() == 0
    ]
    result = set()
    for path in (path for folder in folders for path in folder.iterdir()):
        try:
            if path.lstat().st_uid == UNPRIVILEGED:
                result.add(path)
        except FileNotFoundError:
            continue
    return result


@pytest.fixture(scope="session")
def box() -> Iterator[Sandbox]:
    """Return a sandbox of bubblewrap. Skips the test if the machine has none that works."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bubblewrap, "START_SCRIPT", f"# {MARKER}\n{START_SCRIPT}")
        open_sandbox.cache_clear()
        try:
            sandbox = open_sandbox("bubblewrap")
        except SandboxFailed as error:
            pytest.skip(str(error))
        yield sandbox
        open_sandbox.cache_clear()
