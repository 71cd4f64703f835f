"""The folder of a sweep: its definition, the config that its runs share, their outcomes, and its lock."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from quartet.config.loading import shareable_yaml
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.launcher.sweep.grid import Grid
from quartet.run_directory.identity import fixed_settings
from quartet.run_directory.locking_and_removal import lock_folder
from quartet.run_directory.run_files import RunFiles
from quartet.system.durable_files import write_durably

FORMAT = 1


class SweepFiles:
    """The files of a sweep, below ``root``. Its runs are the other folders there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.definition = root / "sweep.json"
        self.config = root / "sweep.yaml"
        """The config file with the settings of all runs, without the grid and without the password in buffer.url."""
        self.outcomes = root / "outcomes.json"
        self.logs = root / "logs"
        self.table_csv = root / "table.csv"
        self.table_json = root / "table.json"

    def run_config(self, name: str) -> Path:
        """Return the config file from which a run is started."""
        return self.logs / f"{name}.yaml"

    def run_log(self, name: str) -> Path:
        """Return the file with the output of ``quartet train`` for a run."""
        return self.logs / f"{name}.log"

    def read_outcomes(self) -> dict[str, str]:
        """Return why runs ended before their last step, by name: "stopped", or an error."""
        try:
            content = json.loads(self.outcomes.read_text(encoding="utf-8"))
            return {str(name): str(outcome) for name, outcome in content.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError):
            raise ConfigError(f"{self.outcomes}: cannot be read; remove the file") from None

    def write_outcome(self, name: str, outcome: str | None) -> None:
        """Record the outcome of a run; None removes it. Raises OSError."""
        outcomes = self.read_outcomes()
        if outcomes.get(name) == outcome:
            return
        outcomes.pop(name, None)
        if outcome is not None:
            outcomes[name] = outcome
        write_durably(self.outcomes, json.dumps(outcomes, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class Definition:
    """The content of ``sweep.json``: the grid, the number of runs at once, and the settings that all its runs share.

    ``grid``: without fixed settings after it is read, because ``sweep.yaml`` contains them. ``settings``: those of the first
    run that decide what a step learns, by key.
    """

    grid: Grid
    jobs: int
    settings: Mapping[str, Any]

    @classmethod
    def new(cls, grid: Grid, jobs: int, first: Config) -> Definition:
        """Return the definition of a sweep whose first run has this config."""
        # As JSON gives it back, in which tuples are lists.
        settings = json.loads(json.dumps(fixed_settings(first), default=str))
        return cls(grid, jobs, {key: value for key, value in settings.items() if not key.startswith("run.")})

    def write(self, files: SweepFiles, config: Path) -> None:
        """Write ``sweep.json``, and before it ``sweep.yaml``, from a config file. Raises OSError and ConfigError."""
        grid = {"axes": self.grid.axes, "seeds": self.grid.seeds}
        content = {"format": FORMAT, "grid": grid, "jobs": self.jobs, "settings": self.settings}
        write_durably(files.config, shareable_yaml(config, self.grid.fixed))
        write_durably(files.definition, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, files: SweepFiles) -> Definition | None:
        """Return the definition in the folder, or None without one. Raises ConfigError if it cannot be read."""
        try:
            content = json.loads(files.definition.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError
            given = content["grid"]
            axes = {str(key): tuple(map(str, values)) for key, values in given["axes"].items()}
            grid = Grid(axes, seeds=tuple(map(int, given["seeds"])))
            return cls(grid, int(content["jobs"]), dict(content["settings"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"sweep {files.definition}: cannot be read; put the file back, or choose another folder with --name"
            ) from None

    def check(self, wanted: Definition, root: Path) -> None:
        """Raise ConfigError unless ``wanted`` is the sweep in ``root``. The fixed settings are compared by their values."""
        remedy = f"continue it with quartet sweep {quote(str(root))}, or choose another folder with --name"
        before, now = self.grid, wanted.grid
        if (before.axes, before.seeds) != (now.axes, now.seeds):
            own, other = (Grid(grid.axes, (), grid.seeds).arguments() or "one run" for grid in (before, now))
            raise ConfigError(f"sweep {root}: has another grid, {own}, not {other}; {remedy}")
        for key in sorted(self.settings.keys() | wanted.settings.keys()):
            if self.settings.get(key) != wanted.settings.get(key):
                raise ConfigError(
                    f"sweep {root}: {key} is {wanted.settings.get(key)!r}, the sweep has {self.settings.get(key)!r}; {remedy}"
                )


def check_usable(files: SweepFiles) -> None:
    """Raise ConfigError if a new sweep cannot be in the folder."""
    existing = next(path for path in (files.root, *files.root.absolute().parents) if path.exists())
    if not existing.is_dir():
        remedy = (
            "choose another one with --name" if existing == files.root else "set run.directory to a folder of yours"
        )
        raise ConfigError(f"sweep {files.root}: {existing} exists and is not a folder; {remedy}")
    if existing != files.root:
        return
    if RunFiles(files.root).is_run():
        raise ConfigError(f"sweep {files.root}: holds a run; choose another folder with --name")
    # A start that was interrupted has left the lock or the copy of the config.
    own = {".lock", files.config.name, f".{files.config.name}.partial", f".{files.definition.name}.partial"}
    if other := sorted(path.name for path in files.root.iterdir() if path.name not in own):
        raise ConfigError(
            f"sweep {files.root}: has no sweep.json but other files, such as {other[0]}; choose another folder with --name"
        )


def lock_sweep(files: SweepFiles) -> AbstractContextManager[None]:
    """Create the folder and lock it. Raises ConfigError if another process works on the sweep."""
    return lock_folder(
        files.root,
        "sweep",
        f"is active in another process; wait until it ends, or show its table with quartet sweep {quote(str(files.root))} "
        "--table",
    )
