"""Command blocks of the pages below docs/, which tests execute."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> dict[str, list[list[str]]]:
    """Return the commands of each block of a page by the heading above it, without comments. A backslash joins lines."""
    found: dict[str, list[list[str]]] = {}
    heading, language = "", ""
    for line in (DOCS / page).read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        if line.startswith("```"):
            language = "" if language else line[3:] or "none"
            if language == "sh":
                found.setdefault(heading, []).append([])
        elif language == "sh":
            command = re.sub(r"(^|\s+)# .*", "", line).strip()
            found[heading][-1] += [re.sub(r"\s+", " ", command)] if command else []
        elif not language and line.startswith("#"):
            heading = line.lstrip("# ")
    return found


def commands(page: str, section: str, run: str) -> list[list[str]]:
    """Return the commands of each block of a section, for the run ``run`` instead of ``my``."""
    return [[re.sub(r"\bmy(?=[./ ]|$)", run, line) for line in block] for block in blocks(page)[section]]
