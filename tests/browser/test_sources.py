"""The dashboard's files: nothing in them parses data as HTML, or comes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.every_case import every_case

STATIC = Path(__file__).parents[2] / "gateway" / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html"))
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment|srcdoc"
)
ELSEWHERE = re.compile(r"(?:https?:)?//(?!www\.w3\.org/)[a-z0-9-]+\.[a-z]")


@every_case("path", FILES, ids=lambda path: str(path.relative_to(STATIC)))
def test_text_stays_text_and_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text()
    assert FORBIDDEN.search(text) is None
    assert ELSEWHERE.search(text) is None


def test_scripts_and_styles_are_files_of_their_own() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bon[a-z]+=|\bstyle=", page) == []
