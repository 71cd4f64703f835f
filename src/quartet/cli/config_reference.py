"""The reference of all settings, generated from the config tree."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quartet.config.loading import section_of
from quartet.config.root import Config
from quartet.config.section import MAX_SETTING
from quartet.config.supervised import RewardModelConfig


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the tree, such as algorithm.gamma. The name of a key in a list is like reward.parts[].weight."""

    name: str
    field: FieldInfo

    @property
    def default(self) -> str:
        """The default as YAML, or "required"."""
        return "required" if self.field.is_required() else _shown(self.field.get_default(call_default_factory=True))

    @property
    def meaning(self) -> str:
        """The description of the field, on one line."""
        return " ".join((self.field.description or "").split())

    @property
    def accepts(self) -> str:
        """The values that the key takes by its type and bounds."""
        return _accepts(self.field.annotation, self.field.metadata)


def settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """Yield every key that holds a value, section by section."""
    for name, field in section.model_fields.items():
        if section_of(field.annotation) is None or _is_optional(field):
            yield Setting(prefix + name, field)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            yield from settings(below, f"{prefix}{name}{'[]' if _is_list(field) else ''}.")


def reference() -> str:
    """Return one Markdown table for each section."""
    lines = [
        "# Settings",
        "",
        "Which keys a config file has, which values they take, and what they mean. This page is generated from the config",
        "tree by `make generate`; `quartet config reference` prints it.",
        "",
        "[Hyperparameters](../hyperparameters.md) says what TRL, OpenRLHF and NeMo-Aligner call these settings.",
        "`quartet config check CONFIG` also checks the conditions between keys. Numbers without a bound in the table are at",
        f"least -{MAX_SETTING:g} and at most {MAX_SETTING:g}.",
        "",
        "To complete and check keys in an editor with a YAML language server, run `quartet config schema > quartet.schema.json`.",
        "Then start the config with `# yaml-language-server: $schema=quartet.schema.json`, a path relative to the config.",
        "",
    ]
    _describe(Config, "", lines)
    return "\n".join(lines).rstrip() + "\n"


def stages() -> str:
    """Return the tables of the configs of the stages before RLHF."""
    lines = [
        "# Settings of the stages before RLHF",
        "",
        "Which keys the configs of `quartet sft` and `quartet reward-model` have, which values they take, and what they mean.",
        "[From pairs to a policy](../pairs.md) is the guide. This page is generated from the code by `make generate`.",
        "",
        "The tables are those of `quartet reward-model`. `quartet sft` has no `model.pad_token`,",
        "`training.center_rewards_coefficient` and `training.margin_coefficient`.",
        "",
    ]
    _describe(RewardModelConfig, "", lines)
    return "\n".join(lines).replace("## ``", "## Top level").rstrip() + "\n"


def _describe(section: type[BaseModel], prefix: str, lines: list[str]) -> None:
    plain = [setting for setting in settings(section, prefix) if "." not in setting.name[len(prefix) :]]
    if plain:
        about = (section.__doc__ or "").strip().splitlines()[0]
        lines += [
            f"## `{prefix.rstrip('.')}`",
            "",
            about,
            "",
            "| key | default | accepts | meaning |",
            "|---|---|---|---|",
        ]
        for setting in plain:
            default = setting.default if setting.field.is_required() else f"`{setting.default}`"
            cells = (f"`{setting.name}`", default, setting.accepts, setting.meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is not None:
            _describe(below, f"{prefix}{name}{'[]' if _is_list(field) else ''}.", lines)


def _accepts(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for part in arguments[1:] for item in (part.metadata if isinstance(part, FieldInfo) else [part])]
        return _accepts(arguments[0], [*inner, *metadata])
    if origin in (Union, types.UnionType):
        choices = [_accepts(part, metadata) for part in arguments if part is not type(None)]
        return " or ".join([*choices, "null"])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        element = _accepts(arguments[0], [])
        return f"list of {element}" if arguments[-1] is Ellipsis else f"list of {len(arguments)}, each {element}"
    if annotation is bool:
        return "true, false"
    if annotation in (int, float):
        return _number("integer" if annotation is int else "number", metadata)
    if annotation is Path:
        return "path"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    patterns = [item.pattern for item in metadata if getattr(item, "pattern", None)]
    return f"text that matches `{patterns[0]}`" if patterns else "text"


def _number(kind: str, metadata: list[Any]) -> str:
    bounds = {}
    for item in metadata:
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(item, getattr(annotated_types, name.title())) and abs(getattr(item, name)) != MAX_SETTING:
                bounds[name] = _bound(getattr(item, name))
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low and high:
        return f"{kind} in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}"
    if low:
        return f"{kind} {'≥' if 'ge' in bounds else '>'} {low}"
    return f"{kind} {'≤' if 'le' in bounds else '<'} {high}" if high else kind


def _bound(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:.15g}"


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _is_optional(field: FieldInfo) -> bool:
    """Return whether the section may be null, like actor.lora."""
    return not isinstance(field.annotation, type)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # In one line, as in a table.
    return str(list(value)) if isinstance(value, tuple) else str(value)
