"""The runs of a folder, by name."""

from __future__ import annotations

import re
from pathlib import Path

from quartet.config.root import Config
from quartet.config.supervised import StageConfig, load_any_config
from quartet.errors import ConfigError
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.readers.file_cache import FileCache
from quartet.rpc.security.allow_list import GATEWAY
from quartet.rpc.security.credentials import Credentials
from quartet.run_directory.run_files import RunFiles

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Valid names of runs, as for ``run.name`` in the config."""
_NAME = re.compile(NAME_PATTERN[:-1], re.ASCII)
_MAX_CACHED_CONFIGS = 256


class RunCatalog:
    """Every run in one folder. Thread-safe."""

    def __init__(self, folder: Path, credentials: Credentials | None = None) -> None:
        """``credentials`` for calls to the processes of all runs. Defaults to those that the config of each run names."""
        self.folder, self._credentials = folder, credentials
        self._configs = FileCache(load_any_config, _MAX_CACHED_CONFIGS)

    def names(self) -> list[str]:
        """Return the sorted names of all runs; empty if the folder does not exist."""
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError:
            return []
        return [name for name in names if self._files(name) is not None]

    def find(self, name: str) -> RunFiles:
        """Return the files of a run. Raises NotFound."""
        files = self._files(name)
        if files is None:
            raise NotFound(f"run {name!r}: there is no run of this name; GET /api/v1/runs lists the runs")
        return files

    def config(self, name: str) -> Config:
        """Return the resolved config of a run. Raises NotFound, and ConfigError if it cannot be read, or is that of a stage."""
        config = self.any_config(name)
        if not isinstance(config, Config):
            raise ConfigError(f"run {name!r}: is a stage before RLHF, which has no services; its overview shows it")
        return config

    def any_config(self, name: str) -> Config | StageConfig:
        """Return the resolved config of a run, or of a stage before RLHF. Raises NotFound and ConfigError."""
        path = self.find(name).config
        try:
            return self._configs.of(path)
        except OSError:
            raise NotFound(f"run {name!r}: it was just removed") from None

    def credentials(self, name: str) -> Credentials:
        """Return the credentials for calls to the processes of a run. Raises NotFound, and ConfigError if they are not here."""
        return self._credentials or Credentials(GATEWAY, self.config(name).security)

    def _files(self, name: str) -> RunFiles | None:
        """Return the run's files, or None if there is no such run. A link to a folder elsewhere is not a run."""
        if not _NAME.fullmatch(name):
            return None
        path = self.folder / name
        try:
            if path.resolve().parent != self.folder.resolve():
                return None
        except (OSError, RuntimeError):
            return None
        files = RunFiles(path)
        return files if files.is_run() else None
