"""The reference of the chart's values, helm/quartet/VALUES.md, from the comments in values.yaml. Written by `make generate`.

A comment above a key, or behind it on the same line, describes the key. A comment above a section describes the section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

INTRODUCTION = """# Values

Every value of the chart with its default. This page is generated from `values.yaml` by `make generate`. [README.md](README.md)
explains how the values work together, and [configuration](../../docs/reference/configuration.md) has every key of `config`. Keys
of `defaults` are also keys of each component.
"""


def values_page(text: str) -> str:
    """Return the page for the text of a values.yaml."""
    lines = text.splitlines()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    parts = [INTRODUCTION]
    for key, value in root.value:
        rows = list(_rows(key, value, lines, key.value))
        parts.append(f"## {key.value}\n")
        if _is_section(value):
            about = rows.pop(0)[2] if not rows[0][1] else ""
            parts += [f"{about}\n"] if about else []
        parts += ["| value | default | meaning |", "|---|---|---|"]
        parts += [f"| `{path}` | {f'`{default}`' if default else ''} | {meaning} |" for path, default, meaning in rows]
        parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


def _rows(key: yaml.Node, value: yaml.Node, lines: list[str], path: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default and meaning of a value and of those below it."""
    meaning = _above(key, lines)
    if not _is_section(value):
        meaning = " ".join(part for part in (meaning, _behind(value, lines)) if part)
        yield path, _default(value), _escaped(meaning)
        return
    if meaning or "." not in path:
        yield path, "", _escaped(meaning)
    assert isinstance(value, yaml.MappingNode)
    for below, node in value.value:
        yield from _rows(below, node, lines, f"{path}.{below.value}")


def _is_section(node: yaml.Node) -> bool:
    """Return whether a mapping has one key per line. Others are a default as a whole."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def _default(node: yaml.Node) -> str:
    value: Any = yaml.SafeLoader("").construct_document(node)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip().removesuffix("\n...")


def _above(key: yaml.Node, lines: list[str]) -> str:
    """Return the comment above a key, with the same indentation."""
    comment: list[str] = []
    prefix = " " * key.start_mark.column + "#"
    for line in reversed(lines[: key.start_mark.line]):
        if not line.startswith(prefix):
            break
        comment.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(comment)


def _behind(node: yaml.Node, lines: list[str]) -> str:
    """Return the comment behind a value on its line."""
    mark = node.end_mark
    line = lines[mark.line] if mark.line < len(lines) else ""
    rest = line[mark.column :].strip() if mark.line == node.start_mark.line else ""
    return rest.removeprefix("#").strip() if rest.startswith("#") else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
