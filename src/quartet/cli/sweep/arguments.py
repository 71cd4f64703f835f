"""Arguments of `quartet sweep`. Imports the sweep only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def sweep(
    target: Annotated[
        Path,
        typer.Argument(metavar="CONFIG|DIR", help="Config file (YAML), or the folder of a sweep, to continue it."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE,...",
            help="Values of a setting, such as actor.learning_rate=1e-5,3e-5. Lists have brackets, and a text with a comma has "
            "quotes. Repeatable: all combinations are run.",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="N|SEEDS",
            help="Seeds of each setting: 3 is 0, 1 and 2; 0,7 is 0 and 7. Default: the config's seed.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Runs at once. They divide cores, memory and GPUs. Default: 1, or as before."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Folder of the sweep in run.directory. Default: run.name with -sweep."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the table and start nothing.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Metric by which the best setting is marked. Default: reward_mean."),
    ] = None,
    mode: Annotated[Literal["max", "min"], typer.Option(help="Direction of --metric.")] = "max",
    table_format: Annotated[
        Literal["text", "csv", "json"], typer.Option("--format", help="Format of the table.")
    ] = "text",
) -> None:
    """Train runs over a grid of settings and seeds, and compare them in a table. The same command again continues the sweep."""
    from quartet.cli.sweep.command import Request, run_sweep

    run_sweep(Request(target, overrides or [], seeds, jobs, name, table, metric, mode, table_format))
