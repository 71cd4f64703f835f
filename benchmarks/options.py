"""The command line that the benchmarks have in common."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

PERFORMANCE = Path("docs/performance.md")
_ELSEWHERE = ("folder", "page")
"""Options that change nothing of what is measured."""


def positive(text: str) -> int:
    """A number of something that there has to be."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


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
    page: Path = PERFORMANCE,
    *,
    kept: str = "results are",
    rounds: int | None = None,
    threads: bool = False,
) -> None:
    """Add the options of most benchmarks. ``kept``: the files in ``folder``, for the help; ``page``: see ``add_page``."""
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds)
    if threads:
        parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"where {kept} kept")
    add_page(parser, page)


def add_page(parser: argparse.ArgumentParser, page: Path) -> None:
    """Add the option ``--page``. The table goes to ``page`` by default if all other options have their defaults."""
    parser.add_argument(
        "--page", type=Path, help=f"where to write the table (default: {page}, if no other option is given)"
    )
    parser.set_defaults(usual_page=page)


def page_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Path | None:
    """Return where the table goes: ``--page``, or the default page; None if other options would change the table."""
    if options.page is not None:
        result: Path = options.page
        return result
    usual = vars(parser.parse_args([]))
    if all(getattr(options, name) == value for name, value in usual.items() if name not in _ELSEWHERE):
        page: Path = options.usual_page
        return page
    print(
        f"not written to {options.usual_page}, because other options were given; set --page to write it",
        file=sys.stderr,
    )
    return None
