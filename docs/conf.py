"""Settings of the documentation site: `make docs` builds it with Sphinx and MyST."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

ROOT = Path(__file__).parents[1]
_PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = next(
    (url for name, url in _PROJECT.get("urls", {}).items() if name.lower() in ("repository", "source")), None
)
"""Address of the repository, from the project's URLs; None if there is none yet."""

project = "Quartet"
release = _PROJECT["version"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"

# Headings get the anchors that GitHub gives them, so that the same links work in both places.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Quartet {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def link_to_the_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to files outside docs/, which are not on the site. Warn if there is no such file."""
    folder = Path(app.srcdir, docname).parent

    def replace(match: re.Match[str]) -> str:
        text, target = match["text"], match["target"]
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(app.srcdir):
            return match[0]
        if not path.exists():
            getLogger(__name__).warning("%s: no such file", target, location=docname)
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
        if REPOSITORY is not None:
            return f"[{text}]({REPOSITORY}/blob/main/{inside})"
        return f"{text} (`{inside}`)" if "`" not in text else text

    source[0] = re.sub(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)\s]+)\)", replace, source[0])


def setup(app: Sphinx) -> None:
    """Register the handler for links that leave docs/."""
    app.connect("source-read", link_to_the_repository)
