"""Arguments of `quartet sweep`. Imports the sweep only when the command runs."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Optional

import typer


class TableFormat(enum.StrEnum):
    """Format of a table on the standard output."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"


class Mode(enum.StrEnum):
    """Direction of a metric."""

    MAX = "max"
    MIN = "min"


def sweep(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|DIR", help="Config file (YAML), or the folder of a sweep, to continue it."),
    ],
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(
            "--set",
            metavar="KEY=VALUE,...",
            help="Values of a setting, such as actor.learning_rate=1e-5,3e-5. Lists have brackets, and a text with a comma has "
            "quotes. Repeatable: all combinations are run.",
        ),
    ] = None,
    seeds: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="N|SEEDS",
            help="Seeds of each setting: 3 is 0, 1 and 2; 0,7 is 0 and 7. Default: the config's seed.",
        ),
    ] = None,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=64, help="Runs at once. They divide cores, memory and GPUs. Default: 1, or as before."),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Folder of the sweep in run.directory. Default: run.name with -sweep."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the table and start nothing.")] = False,
    metric: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Metric by which the best setting is marked. Default: reward_mean."),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Direction of --metric.")] = Mode.MAX,
    table_format: Annotated[TableFormat, typer.Option("--format", help="Format of the table.")] = TableFormat.TEXT,
) -> None:
    """Train runs over a grid of settings and seeds, and compare them in a table. The same command again continues the sweep."""
    from quartet.cli.sweep.command import Request, run_sweep

    run_sweep(Request(target, overrides or [], seeds, jobs, name, table, metric, mode.value, table_format.value))
