"""The reference of all settings, from the config tree itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from quartet.config import Config, Section


def reference() -> str:
    """One Markdown table for each section."""
    lines = [
        "# Settings",
        "",
        "Every key of a config file. Written by `quartet config reference`; a test holds it to the code.",
        "",
    ]
    _describe(Config, "", lines)
    return "\n".join(lines).rstrip() + "\n"


def _describe(section: type[BaseModel], prefix: str, lines: list[str]) -> None:
    plain = {name: field for name, field in section.model_fields.items() if _section(field.annotation) is None}
    if plain:
        about = (section.__doc__ or "").strip().splitlines()[0]
        lines += [f"## `{prefix.rstrip('.')}`", "", about, "", "| key | default | meaning |", "|---|---|---|"]
        for name, field in plain.items():
            default = "required" if field.is_required() else f"`{_shown(field.default)}`"
            lines.append(f"| `{prefix}{name}` | {default} | {_cell(field.description)} |")
        lines.append("")
    for name, field in section.model_fields.items():
        below = _section(field.annotation)
        if below is not None:
            _describe(below, f"{prefix}{name}.", lines)


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
