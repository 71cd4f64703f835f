"""The JSON Schema of config files: it has every key, refuses other keys, and uses keywords that editors and Helm support."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from typer.testing import CliRunner

from quartet.cli.config_reference import settings
from quartet.cli.main import app
from quartet.config.estimators import BUILT_IN_ESTIMATORS
from quartet.config.schema import json_schema

SCHEMA = json_schema()
ALGORITHM = SCHEMA["properties"]["algorithm"]["properties"]


def keys(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key of the schema, written as in the reference of settings, with its node."""
    for key, value in node.get("properties", {}).items():
        yield prefix + key, value
        yield from keys(value, f"{prefix}{key}.")
        if isinstance(value.get("items"), dict):
            yield from keys(value["items"], f"{prefix}{key}[].")


def test_the_schema_has_exactly_the_settings_with_their_descriptions() -> None:
    result = dict(keys(SCHEMA))
    sections = {key for key, node in result.items() if node["type"] == "object"}
    assert {setting.name for setting in settings()} - result.keys() == set()
    assert result.keys() - sections <= {setting.name for setting in settings()}
    for setting in settings():
        assert result[setting.name]["description"] == setting.meaning


def test_every_section_refuses_unknown_keys() -> None:
    sections = [SCHEMA, *(node for _, node in keys(SCHEMA))]
    for node in [*sections, *(node["items"] for node in sections if isinstance(node.get("items"), dict))]:
        assert ("properties" in node) == (node.get("additionalProperties") is False)


def test_the_schema_is_plain_draft_07() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    words = {word for node in [SCHEMA, *(node for _, node in keys(SCHEMA))] for word in node}
    assert words.isdisjoint({"$ref", "$defs", "anyOf", "prefixItems", "format"})
    assert SCHEMA["properties"]["actor"]["properties"]["optimizer"]["properties"]["betas"]["items"] == [
        {"minimum": 0, "exclusiveMaximum": 1, "type": "number"},
        {"minimum": 0, "exclusiveMaximum": 1, "type": "number"},
    ]


def test_every_integer_has_a_bound_that_fits_into_messages() -> None:
    result = dict(keys(SCHEMA))
    elements = {f"{key}[]": node["items"] for key, node in result.items() if isinstance(node.get("items"), dict)}
    integers = {key: node for key, node in (result | elements).items() if "integer" in node["type"]}
    assert {
        "actor.micro_batch_tokens",
        "reward.parts[].micro_batch_tokens",
        "services.actor.devices[]",
    } <= integers.keys()
    assert integers.pop("run.seed")["exclusiveMaximum"] == 2**63
    assert {key for key, node in integers.items() if not 0 < node.get("maximum", 2**31) < 2**31} == set()


def test_ranges_choices_and_null_match_the_config_tree() -> None:
    assert ALGORITHM["estimator"]["examples"] == list(BUILT_IN_ESTIMATORS)
    for name, known in (("gae", True), ("package.module:function", True), ("ppo", False), ("package:a b", False)):
        assert bool(re.search(ALGORITHM["estimator"]["pattern"], name)) is known
    assert ALGORITHM["dual_clip"]["type"] == ["number", "null"]
    assert ALGORITHM["dual_clip"]["exclusiveMinimum"] == 1
    dtype = SCHEMA["properties"]["reference"]["properties"]["dtype"]
    assert (dtype["type"], dtype["enum"]) == (["string", "null"], ["float32", "bfloat16", "float16", None])
    lora = SCHEMA["properties"]["actor"]["properties"]["lora"]
    assert (lora["type"], lora["default"]) == (["object", "null"], None)
    assert SCHEMA["required"] == ["data", "actor", "reward"]


def test_the_command_prints_the_schema() -> None:
    assert json.loads(CliRunner().invoke(app, ["config", "schema"]).stdout) == SCHEMA
