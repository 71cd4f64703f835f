"""JSON Schema of the config tree, for editors and for the Helm chart."""

from __future__ import annotations

from typing import Any

from quartet.config.root import Config

DRAFT = "http://json-schema.org/draft-07/schema#"
"""Newest JSON Schema version that both editors and Helm support."""

Node = dict[str, Any]


def json_schema() -> Node:
    """Return the schema of each key. Conditions between keys are only checked by ``parse_config``."""
    tree = Config.model_json_schema()
    return {"$schema": DRAFT, "title": "Quartet's config", **_plain(tree, tree.pop("$defs"))}


def _plain(node: Node, sections: dict[str, Node]) -> Node:
    """Convert a node to draft 07 and inline references, so that errors name a path instead of a reference."""
    if "$ref" in node:
        # Draft 07 ignores keys next to a reference. The description of a field is more specific than that of its section.
        node = {**sections[node["$ref"].rpartition("/")[2]], **node}
    if "anyOf" in node:
        *values, null = node["anyOf"]
        assert null == {"type": "null"}, "a field has one type, or several and null last"
        # The other keys of a type, such as the items of an array, do not concern values of another type.
        merged: Node = {}
        for value in values:
            plain = _plain(value, sections)
            merged = {**merged, **plain, "type": [*merged.get("type", []), plain["type"]]}
        node = _with_null(merged) | node
    kept = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "title", "format", "prefixItems")}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if "properties" in kept:
        # The keys of a section have their own defaults.
        if kept.get("default"):
            del kept["default"]
        kept["properties"] = {key: _plain(value, sections) for key, value in kept["properties"].items()}
    if "prefixItems" in node:
        kept["items"] = [_plain(item, sections) for item in node["prefixItems"]]
    elif "items" in kept:
        kept["items"] = _plain(kept["items"], sections)
    return kept


def _with_null(node: Node) -> Node:
    if "enum" in node:
        node["enum"] = [*node["enum"], None]
    return {**node, "type": [*node["type"], "null"]}
