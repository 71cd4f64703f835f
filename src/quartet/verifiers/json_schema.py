"""Verifier of JSON: ``quartet.verifiers.json_schema:valid``. Needs the extra `verifiers` (jsonschema)."""

from __future__ import annotations

import json
from typing import Any

from quartet.system.missing_packages import require_package
from quartet.verifiers.bounded import call_bounded, limit_memory
from quartet.verifiers.errors import InvalidField
from quartet.verifiers.fields import field

require_package("jsonschema", "verifiers")


def valid(
    prompt: str,
    response: str,
    fields: dict[str, Any],
    *,
    schema: dict[str, Any] | bool | None = None,
    schema_field: str = "schema",
    max_characters: int = 65536,
    seconds: float = 2.0,
) -> float:
    """Return 1 if the response is JSON that the schema accepts, or a single Markdown block with such JSON; otherwise 0.

    The schema is the setting ``schema``, or else ``fields["schema"]``. It may refer only to itself. A response of more than
    ``max_characters`` scores 0, and so does one with a number that is too large to check. Raises InvalidField, and
    VerifierTimeout if the check takes longer than ``seconds``.
    """
    chosen = field(fields, schema_field) if schema is None else schema
    name = f"fields: {schema_field!r}" if schema is None else "schema"
    if not isinstance(chosen, dict | bool):
        raise InvalidField(f"{name} is of type {type(chosen).__name__}, expected a JSON schema, which is an object")
    if len(response) > max_characters:
        return 0.0
    result = call_bounded("quartet.verifiers.json_schema:check", [chosen, response], seconds)
    if isinstance(result, str):
        raise InvalidField(f"{name} is not a JSON schema: {result}")
    return float(result)


def check(schema: dict[str, Any] | bool, text: str) -> bool | str:
    """Return whether the schema accepts the text, or what is wrong with the schema. Time limits are up to the caller."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    limit_memory()
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        return str(error.message)[:200]
    try:
        value = json.loads(_without_fence(text), parse_constant=_refuse)
        # An empty registry: a reference is never fetched.
        return bool(kind(schema, registry=Registry()).is_valid(value))
    except OverflowError:  # For example multipleOf: 0.01 of a number with 400 digits.
        return False if _has_only_doubles(schema) else "has a number that is too large, expected at most about 1.8e308"
    except (ValueError, RecursionError):
        return False
    except Unresolvable as error:
        return f"refers to {error.ref}, which is not in it"
    except Exception as error:
        # jsonschema wraps the error of a reference in a private class.
        if isinstance(error.__cause__, Unresolvable):
            return f"refers to {error.__cause__.ref}, which is not in it"
        raise


def _without_fence(text: str) -> str:
    """Return the content of a text that is one Markdown block, or the text."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        return stripped[stripped.index("\n") : -3]
    return stripped


def _has_only_doubles(schema: dict[str, Any] | bool) -> bool:
    """Return whether each number of a schema is a finite double."""
    try:
        json.loads(json.dumps(schema), parse_constant=_refuse, parse_int=lambda digits: int(float(digits)))
    except (ValueError, OverflowError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
