"""Load a config from files and overrides. Errors name file, line and key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ValidationError

from quartet.config.peer_names import KEYS_BY_PEER_NAME
from quartet.config.root import Config, Contradictions
from quartet.config.section import Section
from quartet.config.url_redaction import redact_url
from quartet.errors import ConfigError

STAGE_NAMES = ("sft", "reward-model")
"""Commands with a config of another kind, whose ``stage`` is the name."""
Tree = TypeVar("Tree", bound=Section)
FIRST_CONFIG_LINE = "# The config of a run of Quartet, as resolved.\n"
"""First line of every run's config.yaml. A directory with such a file is a run directory."""
SECTIONS = "a mapping of sections (run, data, actor, reward, ...)"
"""What a config file has."""
MAX_FAST_INDICATORS = 3000
"""Indicators of YAML in a text that libyaml may read. A resolved config has about a third of them."""


def load_config(path: Path, overrides: list[str] | None = None, layers: Sequence[Path] = ()) -> Config:
    """Load a config file, merge ``layers`` into it in order, and apply ``a.b=c`` overrides.

    Raises ConfigError that names file, line and key.
    """
    return load_section(Config, path, overrides, layers)


def load_section(kind: type[Tree], path: Path, overrides: list[str] | None = None, layers: Sequence[Path] = ()) -> Tree:
    """Load a config file of another ``kind`` as ``load_config`` does. Raises ConfigError."""
    tree, locations = _read(path)
    if kind is Config and (stage := tree.get("stage")) in STAGE_NAMES:
        raise ConfigError(f"config {path}: is of quartet {stage}, not of quartet train; run quartet {stage} {path}")
    for layer in layers:
        layer_tree, layer_locations = _read(layer)
        tree = merged_trees(tree, layer_tree)
        locations |= layer_locations
    for override in overrides or []:
        keys = _apply_override(tree, override)
        # Lines of a file whose keys the override replaced.
        locations = {path: where for path, where in locations.items() if path[: len(keys)] != keys}
        locations[keys] = "--set "
        # A section that only the override names has no line in a file.
        for end in range(1, len(keys)):
            locations.setdefault(keys[:end], "--set ")
    return _parse(kind, tree, " + ".join(map(str, (path, *layers))), locations)


def read_tree(path: Path, what: str = "config", expected: str = SECTIONS) -> dict[str, Any]:
    """Return the values in a config file as nested dicts. Raises ConfigError if it cannot be read or is no mapping.

    ``what`` the file is and the mapping that is ``expected`` are for the message.
    """
    return _read(path, what, expected)[0]


def shareable_yaml(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return a config file with overrides as YAML, without defaults, and with the password in buffer.url redacted.

    Raises ConfigError.
    """
    tree, _ = _read(path)
    for override in overrides:
        _apply_override(tree, override)
    buffer = tree.get("buffer")
    if isinstance(buffer, dict) and isinstance(buffer.get("url"), str):
        tree["buffer"] = {**buffer, "url": redact_url(buffer["url"])}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def config_of(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the config in nested mappings, with ``a.b=c`` overrides. Raises ConfigError that names every invalid key."""
    copy = copy_sections(tree)
    locations = {_apply_override(copy, override): "--set " for override in overrides}
    return parse_config(copy, source="of the mapping", locations=locations)


def copy_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested mappings in which paths are strings, as in a file."""
    return {str(key): _as_in_a_file(value) for key, value in tree.items()}


def _as_in_a_file(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copy_sections(value)
    if isinstance(value, list | tuple):
        return [_as_in_a_file(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read(
    path: Path, what: str = "config", expected: str = SECTIONS
) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Return the values in a file as nested dicts, and the location of each key for error messages.

    In a run's config, settings with the default that other settings decide are null again, so that they follow overrides.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{what} {path}: cannot be read ({_reason(error)}); expected the path of a YAML file"
        ) from None
    try:
        node, tree = _parsed(text)
        locations = _key_locations(node, str(path))
    except RecursionError:
        raise ConfigError(f"{what} {path}: nested too deeply; expected {expected}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "malformed"
        raise ConfigError(f"{what} {where}: not YAML ({problem})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{what} {path}: expected {expected}")
    if text.startswith(FIRST_CONFIG_LINE):
        _clear_defaults(tree)
    return tree, locations


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the root of a YAML text and its value. Raises RecursionError, and YAMLError with the problem and its place."""
    # libyaml takes a tenth of the time, but names other problems, and deep nesting crashes it. Each level has an indicator.
    if hasattr(yaml, "CSafeLoader") and sum(map(text.count, "[{-?:")) < MAX_FAST_INDICATORS:
        with suppress(yaml.YAMLError):
            return _document(yaml.CSafeLoader(text))
    return _document(yaml.SafeLoader(text))


def _document(loader: Any) -> tuple[yaml.Node | None, Any]:
    node = loader.get_single_node()
    return node, None if node is None else loader.construct_document(node)


def _clear_defaults(tree: dict[str, Any]) -> None:
    """Set settings to null whose value is the default that other settings decide."""
    try:
        config = Config.model_validate(tree)
    except ValidationError:
        return  # The overrides may correct it; else they are not the only problem.
    for section, name in config.resolved_defaults():
        given = tree
        for part in section.split("."):
            given = given.get(part) or {}
        given[name] = None


def merged_trees(base: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dicts. Values of ``layer`` replace those of ``base``."""
    merged = dict(base)
    for key, value in layer.items():
        before = base.get(key)
        merged[key] = merged_trees(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged


def parse_config(tree: dict[str, Any], source: str, locations: dict[tuple[str, ...], str] | None = None) -> Config:
    """Validate nested dicts. ``locations`` gives file and line of keys. Raises ConfigError that names every invalid key."""
    return _parse(Config, tree, source, locations or {})


def _parse(kind: type[Tree], tree: dict[str, Any], source: str, locations: dict[tuple[str, ...], str]) -> Tree:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(kind, item, source, locations) for item in _errors(error)]
        if len(problems) > 1:
            problems = [f"config {source}: {len(problems)} problems:", *problems]
        raise ConfigError("\n  ".join(problems)) from None


def invalid_keys(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """Return invalid keys and the reason for each. The key is empty for a violated condition between several keys."""
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        return [(".".join(map(str, item["loc"])), _problem(Config, item)) for item in _errors(error)]
    return []


def _errors(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors of pydantic, and one for each rule that the config contradicts.

    A union has one for each of its types, whose name ends the location; they become one.
    """
    merged: dict[tuple[int | str, ...], dict[str, Any]] = {}
    for item in error.errors():
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Contradictions):
            for number, text in enumerate(cause.problems):
                merged[(number,)] = {**item, "loc": (), "text": text}
            continue
        of_union = bool(item["loc"]) and item["loc"][-1] in _UNION_TYPES
        location = item["loc"][:-1] if of_union else item["loc"]
        text = _message(dict(item))
        if of_union and location in merged:
            merged[location]["text"] += f", or {text.removeprefix('expected ')}"
        else:
            merged[location] = {**item, "loc": location, "text": text}
    return list(merged.values())


def _message(item: dict[str, Any]) -> str:
    if item["type"] in _LIMITS:
        words, name = _LIMITS[item["type"]]
        return f"expected {words} {item['ctx'][name]}"
    text = _PLAIN_MESSAGES.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")
    # Pydantic's own texts, such as "Input should be a finite number".
    return f"expected {text.removeprefix(_PYDANTIC)}" if text.startswith(_PYDANTIC) else text


def _describe(root: type[Section], item: dict[str, Any], source: str, locations: dict[tuple[str, ...], str]) -> str:
    path = tuple(str(part) for part in item["loc"])
    # List elements and missing keys have no location, so that of their parent is used.
    known = (locations[path[:end]] for end in range(len(path), 0, -1) if path[:end] in locations)
    where = next(known, f"config {source}: ")
    key = f"{'.'.join(path)}: " if path else ""
    return f"{where}{key}{_problem(root, item)}"


def _problem(root: type[Section], item: dict[str, Any]) -> str:
    location = tuple(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key; {_hint(root, location)}"
    if item["type"] == "missing":
        return "missing; it has no default"
    message = str(item["text"])
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        section = _section_at(root, location)
        message = f"expected a section with the keys {', '.join(section.model_fields)}" if section else message
    if not location:
        return message
    if location[-1] == "url":
        # Not quoted: a malformed URL may contain a password anywhere.
        return message
    if isinstance(item["input"], dict) and item["type"] == "value_error":
        # A condition between the keys of a section: the message names them.
        return message
    value = item["input"]
    return (
        f"{message}, not {redact_url(value)!r}"
        if isinstance(value, str)
        else f"{message}, not {_AS_IN_YAML.get(repr(value)) or redact_url(repr(value))}"
    )


_PYDANTIC = "Input should be "
_LIMITS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Words for pydantic's types of limits, and the name of the limit in the context of the error."""
_UNION_TYPES = ("bool", "int", "float", "constrained-float", "str")
_AS_IN_YAML = {"None": "null", "True": "true", "False": "false"}
_PLAIN_MESSAGES = {
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "int_parsing_size": "expected a smaller number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected a text",
    "tuple_type": "expected a list, such as [0]",
}
"""Messages by pydantic's type of error, whose own texts name its parser and Python's types."""


def _hint(root: type[Section], location: tuple[str, ...]) -> str:
    """Return what an unknown key could mean: another project's name, the same name elsewhere, a similar name, or all names."""
    *sections, name = location
    section = _section_at(root, tuple(sections))
    known = list(section.model_fields) if section else []
    same_name = [key for key in _all_keys(root) if key.endswith(f".{name}") and "." not in key.removesuffix(f".{name}")]
    meant = KEYS_BY_PEER_NAME.get(name) if root is Config else None
    if meant is not None and meant.rpartition(".")[2] in known:
        # Several sections have this setting, and the user has chosen one.
        meant = ".".join((*sections, meant.rpartition(".")[2]))
    elif meant is None or meant.partition(".")[0] not in sections:
        if close := difflib.get_close_matches(name, known, n=1):
            return f"did you mean {close[0]!r}?"
        meant = meant or next(iter(same_name), None)
    return f"did you mean {meant!r}?" if meant is not None else f"known keys: {', '.join(known)}"


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        subsection = section_of(field.annotation)
        if subsection is not None:
            yield from _all_keys(subsection, f"{prefix}{name}.")


def _section_at(root: type[Section], location: tuple[str, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] = root
    for part in location:
        if part.isdecimal():
            continue
        field = section.model_fields.get(part)
        subsection = None if field is None else section_of(field.annotation)
        if subsection is None:
            return None
        section = subsection
    return section


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section type of a field, also if it is optional or the element type of a tuple; None for plain values."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _key_locations(node: yaml.Node | None, source: str, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    locations: dict[tuple[str, ...], str] = {}
    for key, value in node.value:
        path, location = (*prefix, str(key.value)), f"config {source}:{key.start_mark.line + 1}: "
        if path in locations:
            raise ConfigError(f"{location}{'.'.join(path)}: duplicate key; remove one of the two")
        locations[path] = location
        locations |= _key_locations(value, source, path)
    return locations


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Set the key of an override, and return its path."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: expected KEY.KEY=VALUE, for example run.steps=10")
    try:
        # YAML takes # as the start of a comment and would drop the rest of a path or password.
        value = text if "#" in text and text.lstrip()[:1] not in "[{'\"" else yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    # YAML 1.1 reads 1e-5 as a string.
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    _check_flow_mapping(key.strip(), value)
    section = tree
    for part in parts[:-1]:
        if section.get(part) is None:
            section[part] = {}
        if not isinstance(section[part], dict):
            raise ConfigError(f"--set {key.strip()}: {part} is a value, not a section")
        section = cast("dict[str, Any]", section[part])
    section[parts[-1]] = value
    return tuple(parts)


def _check_flow_mapping(key: str, value: Any) -> None:
    """Raise ConfigError for {a:1}, which YAML reads as the key "a:1" without a value."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if inner is None and isinstance(name, str) and ":" in name:
            raise ConfigError(f"--set {key}: {name} has no space after the colon; write {name.replace(':', ': ', 1)}")
        _check_flow_mapping(key, inner)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or "failed") if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
