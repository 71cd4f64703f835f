"""The command line that the benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark, which says of itself what its module does."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_shared(
    parser: argparse.ArgumentParser,
    folder: str,
    page: str = "docs/performance.md",
    *,
    kept: str = "figures are",
    written: str = "the table goes",
    rounds: int | None = None,
    threads: bool = False,
) -> None:
    """The options of most benchmarks. ``kept`` in ``folder`` and ``written`` into ``page``: words for what there is."""
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if threads:
        parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"where {kept} kept")
    parser.add_argument("--page", type=Path, default=Path(page), help=f"where {written}")
