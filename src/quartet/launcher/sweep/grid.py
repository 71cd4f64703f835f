"""The grid of a sweep: settings with several values, and seeds. Its runs, their names and their configs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.config.url_redaction import redact_url
from quartet.errors import ConfigError

MAX_RUNS = 1000
"""Maximum number of runs of a sweep."""
MAX_NAME = 64
"""Maximum number of characters of the name of a run."""
_BRACKETS = {"[": "]", "{": "}"}
_REFUSED = {
    "run.name": "the sweep names its runs; name the sweep with --name",
    "buffer": "all runs of a sweep use one Redis; give one value, in quotes if it contains a comma",
    "buffer.url": "all runs of a sweep use one Redis; give one value, in quotes if it contains a comma",
    "run.directory": "all runs of a sweep are in its folder; give one value",
}


@dataclass(frozen=True, slots=True)
class Grid:
    """Values to combine, as text of ``--set``.

    ``axes``: the values of each setting that has several, by key. ``fixed``: KEY=VALUE for every run. ``seeds``: empty for the
    config's own seed.
    """

    axes: dict[str, tuple[str, ...]]
    fixed: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    def settings(self) -> list[dict[str, str]]:
        """Return every combination of the axes' values, by key. The last axis varies fastest."""
        return [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]

    def arguments(self) -> str:
        """Return the options of the command line that give this grid."""
        options = [*self.fixed, *(f"{key}={','.join(values)}" for key, values in self.axes.items())]
        parts = [f"--set {quote(option)}" for option in options]
        if self.seeds:
            count = self.seeds == tuple(range(len(self.seeds)))
            parts.append(f"--seeds {len(self.seeds) if count else ','.join(map(str, self.seeds))}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep: its name, its values of the axes as text, and its config."""

    name: str
    setting: Mapping[str, str]
    config: Config

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.run.seed


def parse_grid(overrides: Sequence[str], seeds: str | None) -> Grid:
    """Return the grid of ``--set KEY=VALUE,VALUE`` options and of ``--seeds``. Raises ConfigError.

    A comma inside brackets or quotes does not separate values.
    """
    axes: dict[str, tuple[str, ...]] = {}
    fixed: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(
                f"--set {override}: expected KEY.KEY=VALUE,VALUE, for example actor.learning_rate=1e-5,3e-5"
            )
        if key in axes or key in fixed:
            raise ConfigError(f"--set {key}: given twice; give all values in one option, separated by commas")
        values = split_values(key, text)
        if len(values) == 1:
            fixed[key] = override
            continue
        if key in _REFUSED:
            raise ConfigError(f"--set {key}: {_REFUSED[key]}")
        if key == "run.seed":
            raise ConfigError("--set run.seed: give several seeds with --seeds, for example --seeds 0,7")
        axes[key] = values
    if seeds is not None and "run.seed" in fixed:
        raise ConfigError("--set run.seed and --seeds: give only one of them")
    if "run.name" in fixed:
        raise ConfigError(f"--set run.name: {_REFUSED['run.name']}")
    return Grid(axes, tuple(fixed.values()), parse_seeds(seeds) if seeds is not None else ())


def split_values(key: str, text: str) -> tuple[str, ...]:
    """Return the values of one ``--set`` option. Raises ConfigError."""
    values: list[str] = []
    closing: list[str] = []
    start, quoted, opens = 0, "", True
    for position, character in enumerate(text):
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "'\"" and opens:
            quoted = character
        elif character in _BRACKETS and (opens or closing):
            closing.append(_BRACKETS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            values.append(text[start:position].strip())
            start = position + 1
        # A quote or a bracket inside a word, as in it's, opens nothing.
        opens = character in ",[{:" or (opens and character.isspace())
    values.append(text[start:].strip())
    shown = redact_url(text)
    if quoted or closing:
        raise ConfigError(f"--set {key}={shown}: {(quoted or closing[-1])!r} is missing; close every bracket and quote")
    if not all(values):
        raise ConfigError(
            f"--set {key}={shown}: an empty value; write null or a value, and quote a value that contains a comma"
        )
    if repeated := sorted({value for value in values if values.count(value) > 1}):
        raise ConfigError(f"--set {key}={shown}: the value {redact_url(repeated[0])} is given twice; remove one")
    return tuple(values)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds of ``--seeds``: a number N for 0 to N - 1, or seeds separated by commas. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts):
        raise ConfigError(f"--seeds {text}: expected a number of seeds, such as 3, or seeds, such as 0,7")
    numbers = tuple(map(int, parts))
    if len(parts) == 1:
        if not 1 <= numbers[0] <= MAX_RUNS:
            raise ConfigError(
                f"--seeds {text}: expected 1 to {MAX_RUNS} seeds; for the one seed {text}: --set run.seed={text}"
            )
        return tuple(range(numbers[0]))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"--seeds {text}: a seed is given twice; remove one")
    return numbers


def plan_runs(config_path: Path, grid: Grid, folder: Path, overrides: Sequence[str] = ()) -> list[PlannedRun]:
    """Return the runs of a sweep in ``folder``, by setting and seed, each with its valid config. Raises ConfigError.

    ``overrides``: KEY=VALUE for every run, in addition to the grid, such as those of the environment.
    """
    settings = grid.settings()
    count = len(settings) * max(1, len(grid.seeds))
    if count > MAX_RUNS:
        raise ConfigError(f"--set, --seeds: the grid has {count} runs; expected at most {MAX_RUNS}; give fewer values")
    own_seeds = [load_setting(config_path, grid, setting, overrides).run.seed for setting in settings]
    names = setting_names(grid, max(grid.seeds or own_seeds))
    runs = []
    for setting, name, own_seed in zip(settings, names, own_seeds, strict=True):
        for seed in grid.seeds or (own_seed,):
            run_name = f"{name}--seed-{seed}" if name else f"seed-{seed}"
            place = [*overrides, f"run.seed={seed}", f"run.name={run_name}", f"run.directory={_quoted(folder)}"]
            runs.append(PlannedRun(run_name, setting, load_setting(config_path, grid, setting, place)))
    _check_different(runs)
    return runs


def load_setting(config_path: Path, grid: Grid, setting: Mapping[str, str], further: Sequence[str] = ()) -> Config:
    """Return the config of one combination of values. Raises ConfigError."""
    assignments = [f"{key}={value}" for key, value in setting.items()]
    try:
        return load_config(config_path, [*grid.fixed, *assignments, *further])
    except ConfigError as error:
        if not setting:
            raise
        raise ConfigError(f"{error}\n  in the setting {describe(setting)} of the sweep") from None


def describe(setting: Mapping[str, str]) -> str:
    """Return the values of a setting in one line, without passwords in URLs."""
    return redact_url(" ".join(f"{key}={value}" for key, value in setting.items()))


def setting_names(grid: Grid, max_seed: int) -> list[str]:
    """Return a name for each setting, as a part of run names: its keys and values, or its number if they do not fit."""
    labels = short_keys(list(grid.axes))
    names = [
        "--".join(f"{labels[key]}-{_as_name(value)}" for key, value in setting.items()) for setting in grid.settings()
    ]
    longest = MAX_NAME - len(f"--seed-{max_seed}")
    if len(set(names)) < len(names) or max(map(len, names)) > longest:
        return [f"setting-{number}" for number in range(1, len(names) + 1)]
    return names


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key has: learning_rate for actor.learning_rate."""
    labels = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        labels[key] = next(
            end for end in ends if end == key or sum(f".{other}".endswith(f".{end}") for other in keys) == 1
        )
    return labels


def _as_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", value).strip("_") or "_"


def _quoted(path: Path) -> str:
    """Return a path as a YAML string, whatever characters it has."""
    return "'" + str(path).replace("'", "''") + "'"


def _check_different(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if two settings are the same to the config, such as 1e-5 and 0.00001."""
    known: dict[str, PlannedRun] = {}
    for run in runs:
        content = run.config.model_dump_json(exclude={"run": {"name"}})
        other = known.setdefault(content, run)
        if other is not run:
            raise ConfigError(
                f"--set {describe(run.setting)}: the same as {describe(other.setting)}; remove one of the two"
            )
