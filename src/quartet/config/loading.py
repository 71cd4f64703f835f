"""A config file and its overrides, read into the tree; every error names file, line and key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from quartet.config.section import Section
from quartet.config.tree import Config, redact_url
from quartet.errors import ConfigError


def load_config(path: Path, overrides: list[str] | None = None, layers: Sequence[Path] = ()) -> Config:
    """Reads a config file, lays ``layers`` over it, key by key and in their order, and applies ``a.b=c`` overrides.

    Raises ConfigError naming file, line and key.
    """
    tree, places = _read(path)
    for layer in layers:
        above, its_places = _read(layer)
        tree = _laid_over(tree, above)
        places |= its_places
    for override in overrides or []:
        places[_apply_override(tree, override)] = "--set "
    return parse_config(tree, source=" + ".join(map(str, (path, *layers))), places=places)


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """The tree of plain values in a file, and where each key stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read ({_reason(error)}); give the path of a YAML file") from None
    try:
        places = _key_places(yaml.compose(text, Loader=yaml.SafeLoader), str(path))
        tree = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"config {path}: nested too deeply; expected a mapping of sections") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"config {where}: not YAML ({problem})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of sections (run, data, actor, reward, ...)")
    return tree, places


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Section by section the values of ``above``, and where it has none, those of ``below``."""
    found = dict(below)
    for key, value in above.items():
        under = below.get(key)
        found[key] = _laid_over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return found


def parse_config(tree: dict[str, Any], source: str, places: dict[tuple[str, ...], str] | None = None) -> Config:
    """Checks a tree of plain values; ``places`` says where a key stands. Raises ConfigError naming every wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(dict(item), source, places or {}) for item in error.errors()]
        raise ConfigError("; ".join(problems)) from None


def wrong_keys(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with a tree of plain values: each wrong key and why; an empty key for what several make wrong together."""
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return [(".".join(map(str, item["loc"])), _problem(dict(item))) for item in error.errors()]
    return []


def _describe(item: dict[str, Any], source: str, places: dict[tuple[str, ...], str]) -> str:
    location = tuple(str(part) for part in item["loc"])
    # An element of a list, or a key that is missing, stands where its parent does.
    known_places = (places[location[:end]] for end in range(len(location), 0, -1) if location[:end] in places)
    where = next(known_places, f"config {source}: ")
    key = f"{'.'.join(location)}: " if location else ""
    return f"{where}{key}{_problem(item)}"


def _problem(item: dict[str, Any]) -> str:
    location = tuple(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _keys_beside(location)
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown key; {hint}"
    if item["type"] == "missing":
        return "missing; it has no default"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "int_parsing_size":
        # More than pydantic can count to.
        message = "expected a smaller number"
    if not location:
        return message
    if location[-1] == "url":
        # Malformed, so nobody knows where in it a password is.
        return message
    found = redact_url(item["input"]) if isinstance(item["input"], str) else item["input"]
    return f"{message}, not {found!r}"


def _keys_beside(location: tuple[str, ...]) -> list[str]:
    section: type[BaseModel] = Config
    for part in location[:-1]:
        if part.isdecimal():
            continue
        field = section.model_fields.get(part)
        below = None if field is None else section_of(field.annotation)
        if below is None:
            return []
        section = below
    return list(section.model_fields)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds: alone, as an option, or as the elements of a tuple."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _key_places(node: yaml.Node | None, source: str, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    found: dict[tuple[str, ...], str] = {}
    for key, value in node.value:
        path, place = (*prefix, str(key.value)), f"config {source}:{key.start_mark.line + 1}: "
        if path in found:
            raise ConfigError(f"{place}{'.'.join(path)}: stands twice; expected each key once, remove one")
        found[path] = place
        found |= _key_places(value, source, path)
    return found


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Sets the key, and gives its path."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected KEY.KEY=VALUE, for example run.steps=10")
    try:
        # Elsewhere a # begins a comment, and the rest of a path or password would be lost.
        value = text if "#" in text and text.lstrip()[:1] not in "[{'\"" else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    # YAML 1.1 reads 1e-5 as a string; everyone here means the number.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    here = tree
    for part in parts[:-1]:
        if here.get(part) is None:
            here[part] = {}
        if not isinstance(here[part], dict):
            raise ConfigError(f"--set {key.strip()}: {part} is a value, not a section")
        here = cast("dict[str, Any]", here[part])
    here[parts[-1]] = value
    return tuple(parts)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "failed") if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
