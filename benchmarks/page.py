"""The part of a page that a benchmark writes, between two marks. The rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path


def begin(command: str) -> str:
    """Return the mark before the part that a benchmark writes."""
    return f"<!-- {_name(command)}: what follows is written by python -m benchmarks -->"


def end(command: str) -> str:
    """Return the mark after the part that a benchmark writes."""
    return f"<!-- {_name(command)}: end -->"


def _name(command: str) -> str:
    # A comment of HTML may not have two dashes.
    return command.replace(" --", "-")


def write(page: Path | None, command: str, text: str) -> None:
    """Write a benchmark's ``command``, its name and options, and its ``text`` into the page. Without a page, write nothing.

    Raises ValueError if the page has lost a mark.
    """
    if page is None:
        return
    first, last = begin(command), end(command)
    before, result, rest = page.read_text(encoding="utf-8").partition(first)
    _, closed, after = rest.partition(last)
    if not result or not closed:
        raise ValueError(f"{page} has lost a mark: expected {first} and then {last}")
    part = f"{first}\n\n`python -m benchmarks {command}`\n\n{text.strip()}\n\n{last}"
    page.write_text(f"{before}{part}{after}", encoding="utf-8")
