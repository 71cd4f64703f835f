"""The sources of the dashboard never parse data as HTML and load nothing from other sites."""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parents[2] / "gateway" / "static"
FILES = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html"))
HTML_PARSER = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment|srcdoc"
)
EXTERNAL = re.compile(r"(?:https?:)?//(?!www\.w3\.org/)[a-z0-9-]+\.[a-z]")
IMPORT = re.compile(r'from "(\.[^"]+)"')


def test_no_source_parses_data_as_html_or_loads_from_other_sites() -> None:
    results = {
        str(path.relative_to(STATIC)): match[0]
        for path in FILES
        for pattern in (HTML_PARSER, EXTERNAL)
        if (match := pattern.search(path.read_text()))
    }
    assert results == {}


def test_scripts_and_styles_are_separate_files() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bon[a-z]+=|\bstyle=", page) == []


def test_scripts_import_existing_files_without_cycles() -> None:
    imports = {
        path: [(path.parent / name).resolve() for name in IMPORT.findall(path.read_text())]
        for path in FILES
        if path.suffix == ".js"
    }
    assert {target for targets in imports.values() for target in targets} <= imports.keys()
    done: set[Path] = set()

    def visit(path: Path, importers: tuple[Path, ...]) -> None:
        assert path not in importers, " -> ".join(step.name for step in (*importers, path))
        if path not in done:
            for target in imports[path]:
                visit(target, (*importers, path))
            done.add(path)

    for path in imports:
        visit(path, ())
