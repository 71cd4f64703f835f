"""The reference of all settings, from the config tree itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quartet.config import Config
from quartet.config.loading import section_of


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the tree, such as algorithm.gamma; ``name`` writes an element of a list as reward.parts[].weight."""

    name: str
    field: FieldInfo

    @property
    def default(self) -> str:
        """As one would write it in the file."""
        return "required" if self.field.is_required() else _shown(self.field.get_default(call_default_factory=True))

    @property
    def meaning(self) -> str:
        """Its one-line description."""
        return " ".join((self.field.description or "").split())


def settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """Every key that holds a value, section after section."""
    for name, field in section.model_fields.items():
        if section_of(field.annotation) is None or _is_optional(field):
            yield Setting(prefix + name, field)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            yield from settings(below, f"{prefix}{name}{'[]' if _is_list(field) else ''}.")


def reference() -> str:
    """One Markdown table for each section."""
    lines = [
        "# Settings",
        "",
        "Every key of a config file. Written by `quartet config reference`; a test holds it to the code.",
        "",
        "An editor with a YAML language server completes and checks the keys once `quartet config schema > quartet.schema.json`",
        "has written their JSON Schema and the config begins with `# yaml-language-server: $schema=quartet.schema.json`, a path",
        "from the config's own folder. What keys must be together, `quartet config check` says.",
        "",
    ]
    _describe(Config, "", lines)
    return "\n".join(lines).rstrip() + "\n"


def _describe(section: type[BaseModel], prefix: str, lines: list[str]) -> None:
    plain = [setting for setting in settings(section, prefix) if "." not in setting.name[len(prefix) :]]
    if plain:
        about = (section.__doc__ or "").strip().splitlines()[0]
        lines += [f"## `{prefix.rstrip('.')}`", "", about, "", "| key | default | meaning |", "|---|---|---|"]
        for setting in plain:
            default = setting.default if setting.field.is_required() else f"`{setting.default}`"
            lines.append(f"| `{setting.name}` | {default} | {setting.meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            _describe(below, f"{prefix}{name}{'[]' if _is_list(field) else ''}.", lines)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _is_optional(field: FieldInfo) -> bool:
    """Whether the section may be left out as a whole, as actor.lora may."""
    return not isinstance(field.annotation, type)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
