"""The files that a run leaves below its directory."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quartet.errors import ConfigError
from quartet.files import write_durably


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

    def claim(self) -> None:
        """Makes the directory and keeps it for this process until it ends. Raises ConfigError when another has it."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._claim = (self.root / ".lock").open("w")
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run directory {self.root}: a run is going on there; wait for its end, or choose another run.name"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run directory {self.root}: cannot be written ({error.strerror}); set run.directory to a folder of yours"
            ) from None

    def drop(self) -> None:
        """Removes what an earlier run left, and nothing else."""
        for path in (self.config, self.metrics):
            path.unlink(missing_ok=True)
        for directory in (self.trajectories, self.checkpoints, self.policy, self.logs, self.redis):
            shutil.rmtree(directory, ignore_errors=True)

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
            write_durably(self.config, text)
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


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Every step of a ``metrics.jsonl``. Raises ConfigError naming the line that is not JSON."""
    steps = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            steps.append(json.loads(line))
        except ValueError:
            raise ConfigError(f"metrics {path}:{number}: not JSON") from None
    return steps
