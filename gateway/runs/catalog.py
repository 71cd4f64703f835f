"""The runs of a folder, by name."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from pathlib import Path

from quartet.config import Config, load_config
from quartet.gateway.http_errors import NotFound
from quartet.run_directory.run_files import RunFiles

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""What a run may be called, as in the config's ``run.name``."""
_NAME = re.compile(NAME_PATTERN[:-1], re.ASCII)
_KEPT = 256

Signature = tuple[int, int, int]


def signature(path: Path) -> Signature:
    """What changes when a file does: its inode, when it was written, its size. Raises OSError."""
    about = path.stat()
    return about.st_ino, about.st_mtime_ns, about.st_size


class Runs:
    """Every run below one folder. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._configs: OrderedDict[str, tuple[Signature, Config]] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Of all runs, sorted; none where the folder is not there."""
        try:
            found = sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return []
        return [name for name in found if self._files(name) is not None]

    def find(self, name: str) -> RunFiles:
        """Where the run lies. Raises NotFound."""
        files = self._files(name)
        if files is None:
            raise NotFound(f"run {name!r}: there is none of this name; GET /api/v1/runs lists them")
        return files

    def config(self, name: str) -> Config:
        """The run's config as resolved. Raises NotFound, and ConfigError when it cannot be read."""
        path = self.find(name).config
        try:
            seen = signature(path)
        except OSError:
            raise NotFound(f"run {name!r}: it was removed just now") from None
        with self._lock:
            known = self._configs.get(name)
        if known is not None and known[0] == seen:
            return known[1]
        config = load_config(path)
        with self._lock:
            self._configs[name] = (seen, config)
            self._configs.move_to_end(name)
            if len(self._configs) > _KEPT:
                self._configs.popitem(last=False)
        return config

    def _files(self, name: str) -> RunFiles | None:
        """The run's files; None unless a run of this name lies in the folder itself, not elsewhere by way of a link."""
        if not _NAME.fullmatch(name):
            return None
        path = self.folder / name
        try:
            if path.resolve().parent != self.folder.resolve():
                return None
        except (OSError, RuntimeError):
            return None
        files = RunFiles(path)
        return files if files.is_a_run() else None
