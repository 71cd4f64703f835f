"""The part of a page that a benchmark writes, between two marks. The rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path


def begin(name: str) -> str:
    """Return the mark before the part that a benchmark writes."""
    return f"<!-- {name}: what follows is written by make {name} -->"


def end(name: str) -> str:
    """Return the mark after the part that a benchmark writes."""
    return f"<!-- {name}: end -->"


def write(page: Path | None, name: str, text: str) -> None:
    """Write the command and ``text`` between the marks of ``name``; do nothing if ``page`` is None.

    Raises ValueError if the page has lost a mark.
    """
    if page is None:
        return
    before, result, rest = page.read_text(encoding="utf-8").partition(begin(name))
    _, closed, after = rest.partition(end(name))
    if not result or not closed:
        raise ValueError(f"{page} has lost a mark: expected {begin(name)} and then {end(name)}")
    page.write_text(f"{before}{begin(name)}\n\n`make {name}`\n\n{text.strip()}\n\n{end(name)}{after}", encoding="utf-8")
