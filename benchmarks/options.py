"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import page

PERFORMANCE = Path("docs/evidence/performance.md")
NOT_MEASURED = frozenset({"folder", "page"})
"""Options that do not change the measurement."""


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected at least 1")
    return number


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark. ``description`` is the docstring of its module."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_shared(
    parser: argparse.ArgumentParser,
    folder: str,
    page: Path = PERFORMANCE,
    *,
    contents: str = "results",
    rounds: int | None = None,
    threads: bool = False,
) -> None:
    """Add the options of most benchmarks. ``contents``: files in ``folder``, for the help; ``page``: see ``add_page``."""
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds)
    if threads:
        parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"folder of the {contents}")
    add_page(parser, page)


def add_page(parser: argparse.ArgumentParser, page: Path) -> None:
    """Add the option ``--page``. Its default is ``page`` if all other options have their defaults."""
    parser.add_argument(
        "--page", type=Path, help=f"page to write the table to (default: {page}, if no other option is given)"
    )
    parser.set_defaults(usual_page=page)


def page_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, not_measured: frozenset[str] = NOT_MEASURED
) -> Path | None:
    """Return the page for the table: ``--page`` or the default page, or None if other options change the table.

    Options in ``not_measured`` do not change it.
    """
    if options.page is not None:
        result: Path = options.page
        return result
    usual = vars(parser.parse_args([]))
    if all(getattr(options, name) == value for name, value in usual.items() if name not in not_measured):
        page: Path = options.usual_page
        return page
    print(
        f"not written to {options.usual_page}, because other options were given; set --page to write it",
        file=sys.stderr,
    )
    return None


def publish(parser: argparse.ArgumentParser, options: argparse.Namespace, report: Mapping[str, Any], text: str) -> None:
    """Write ``report`` to results.json in the folder of the results, print ``text``, and write it into its page."""
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    print(text)
    page.write(page_of(parser, options), parser.prog.rpartition(" ")[2], text)
