"""Folders with weights are deleted when their owner has ended, and never before."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from quartet.engines.weight_folders import OwnedFolder, WeightFolders

# Writes a checkpoint and is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
from quartet.engines.weight_folders import WeightFolders
folder = WeightFolders(Path(sys.argv[1])).replaced("digest")
folder.mkdir()
(folder / "model.safetensors").write_bytes(b"weights")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_weights_of_killed_processes_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    folders = WeightFolders(tmp_path)
    folders.replaced("digest")
    assert not list(tmp_path.rglob("*.safetensors"))
    folders.close()
    assert not list(tmp_path.iterdir())


def test_folders_of_processes_that_run_and_of_other_programs_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "quartet-data"
    theirs.mkdir()
    (theirs / "file").touch()
    first = OwnedFolder(tmp_path, "quartet-")
    (first.path / "file").touch()
    second = OwnedFolder(tmp_path, "quartet-")
    assert (first.path / "file").exists()
    assert (theirs / "file").exists()
    assert first.path != second.path
    for folder in (first, second, second):
        folder.close()
    assert list(tmp_path.iterdir()) == [theirs]


def test_the_rest_of_a_folder_is_deleted_after_a_deletion_that_was_interrupted(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (weights,) = tmp_path.rglob("*.safetensors")
    weights.unlink()
    OwnedFolder(tmp_path, "quartet-").close()
    assert not list(tmp_path.iterdir())


def test_only_the_present_version_is_kept(tmp_path: Path) -> None:
    folders = WeightFolders(tmp_path)
    for name in ("first", "second"):
        folders.replaced(name).mkdir()
    folders.keep(folders.replaced("third"))
    assert not list(tmp_path.rglob("first"))
    assert not list(tmp_path.rglob("second"))
    # The folder still belongs to this process.
    OwnedFolder(tmp_path, "quartet-").close()
    assert len(list(tmp_path.iterdir())) == 1
    folders.close()
