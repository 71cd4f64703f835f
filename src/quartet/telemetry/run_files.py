"""The files that a run leaves below its directory."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.files import write_durably

MARK = "# The config of a run of Quartet, as resolved.\n"
"""First line of every run's config.yaml: by it a run's directory is known."""


class RunFiles:
    """``config.yaml``, ``metrics.jsonl``, ``trajectories/``, ``checkpoints/``, ``policy/``, ``logs/`` of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.trajectories = root / "trajectories"
        self.checkpoints = root / "checkpoints"
        self.policy = root / "policy"
        self.logs = root / "logs"
        self.redis = root / "redis"
        self._aside = root / ".earlier"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the directory and keeps it for this run alone. Raises ConfigError when another run has it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"run directory {self.root}: a run is going on there; wait for its end, or choose another run.name"
                ) from None
            yield

    def set_aside(self) -> None:
        """Moves an earlier run out of the way, to come back with ``restore`` or go with ``forget``.

        Raises ConfigError when what lies there under a run's names is not a run's.
        """
        found = [path for path in self._own() if path.exists()]
        if found and not self._is_a_run():
            raise ConfigError(
                f"--overwrite: {found[0]} is not of a run of Quartet's; choose another run.name, or move it away"
            )
        shutil.rmtree(self._aside, ignore_errors=True)
        self._aside.mkdir()
        for path in found:
            path.rename(self._aside / path.name)

    def restore(self) -> None:
        """Puts back what was set aside and not forgotten, in place of what has come since."""
        if not self._aside.exists():
            return
        for path in self._own():
            _remove(path)
        for path in self._aside.iterdir():
            path.rename(self.root / path.name)
        self._aside.rmdir()

    def forget(self) -> None:
        """Lets go of what was set aside."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _own(self) -> list[Path]:
        return [
            self.config,
            self.metrics,
            self.trajectories,
            self.checkpoints,
            self.policy,
            self.logs,
            self.redis,
        ]

    def _is_a_run(self) -> bool:
        try:
            return self.config.read_text(encoding="utf-8").startswith(MARK)
        except (OSError, UnicodeDecodeError):
            return False

    def check_unused(self) -> None:
        """Raises ConfigError when a run has left its files here."""
        if self.metrics.exists() or self.policy.exists():
            raise ConfigError(
                f"run directory {self.root}: holds an earlier run; choose another run.name, or give --overwrite to drop it"
            )

    def write_config(self, text: str) -> None:
        """Writes ``config.yaml``. Raises ConfigError when the directory cannot be written."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            write_durably(self.config, MARK + text)
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None

    def append_metrics(self, metrics: dict[str, float]) -> None:
        """Adds one step's line to ``metrics.jsonl``."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")

    def write_trajectories(self, step: int, trajectories: Iterable[dict[str, Any]]) -> None:
        """Writes ``trajectories/step-000001.jsonl``, one object for each response."""
        self.trajectories.mkdir(exist_ok=True)
        lines = "".join(json.dumps(trajectory, ensure_ascii=False) + "\n" for trajectory in trajectories)
        (self.trajectories / f"step-{step:06d}.jsonl").write_text(lines, encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every step of a ``metrics.jsonl``. Raises ConfigError naming the line that is not JSON."""
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            steps.append(json.loads(line))
        except ValueError:
            raise ConfigError(f"metrics {path}:{number}: not JSON") from None
    return steps
