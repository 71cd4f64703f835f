"""The config tree as a JSON Schema, for editors and for the Helm chart."""

from __future__ import annotations

from typing import Any

from quartet.config.tree import Config

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest version that editors and Helm understand alike."""

Node = dict[str, Any]


def json_schema() -> Node:
    """What may stand in a config file, key by key; what keys must be together is left to ``parse_config``."""
    tree = Config.model_json_schema()
    return {"$schema": DRAFT, "title": "Quartet's config", **_plain(tree, tree.pop("$defs"))}


def _plain(node: Node, sections: dict[str, Node]) -> Node:
    """A node in the words of draft 07, with each section in its place: errors then name a path and no reference."""
    if "$ref" in node:
        # Draft 07 would ignore what stands beside the reference; a field's description says more than its section's.
        node = {**sections[node["$ref"].rpartition("/")[2]], **node}
    if "anyOf" in node:
        value, null = node["anyOf"]
        assert null == {"type": "null"}, "fields have one type, or that and null"
        node = _with_null(_plain(value, sections)) | node
    kept = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "title", "format", "prefixItems")}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    if "properties" in kept:
        # The defaults of a section are those of its keys.
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
    return {**node, "type": [node["type"], "null"]}
