"""Directory through which a server gets the weights of a generator."""

from __future__ import annotations

import shutil
from pathlib import Path


class WeightFolders:
    """Folders with the present policy version, in a directory that the server sees under the same path."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._root = directory.absolute() / owner

    def replaced(self, name: str) -> Path:
        """Return the path of a folder that does not exist yet. Deletes an earlier folder of this name."""
        shutil.rmtree(self._root / name, ignore_errors=True)
        return self._root / name

    def keep(self, folder: Path) -> None:
        """Delete every folder except this one."""
        for other in self._root.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def close(self) -> None:
        """Delete all folders."""
        shutil.rmtree(self._root, ignore_errors=True)
