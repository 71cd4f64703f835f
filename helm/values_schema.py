"""`python helm/values_schema.py`: holds `config` in the chart's values.schema.json against the config tree; --write: writes it.

The rest of that file is written by hand.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from quartet.config import json_schema

SCHEMA = Path(__file__).parent / "quartet/values.schema.json"
WIDTH = 115
"""Of what stands in one line, without its key."""


def main(arguments: list[str]) -> int:
    """Exit status: 0 where the schema is that of the tree, 1 where it differs."""
    if arguments not in ([], ["--write"]):
        print("usage: python helm/values_schema.py [--write]", file=sys.stderr)
        return 2
    kept = SCHEMA.read_text(encoding="utf-8")
    now = generated(kept)
    if arguments:
        SCHEMA.write_text(now, encoding="utf-8")
    elif kept != now:
        lines = difflib.unified_diff(kept.splitlines(True), now.splitlines(True), f"{SCHEMA.name}, kept", "now")
        sys.stdout.writelines(lines)
        print(
            "error: helm/quartet/values.schema.json differs, see above; run make helm-schema, commit", file=sys.stderr
        )
        return 1
    return 0


def generated(kept: str) -> str:
    """The text of the chart's schema with the config tree of today in it."""
    schema = json.loads(kept)
    config = {key: value for key, value in json_schema().items() if key not in ("$schema", "title")}
    schema["properties"]["config"] = {
        **config,
        "description": "The run, as in a config file. Generated: make helm-schema.",
    }
    return _written(schema) + "\n"


def _written(value: Any, indent: int = 0) -> str:
    """JSON with each value in a line of its own, or in one line where it is short."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or indent + len(line) <= WIDTH:
        return line
    pad = " " * (indent + 2)
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _written(item, indent + 2) for item in value) + f"\n{' ' * indent}]"
    items = (f"{pad}{json.dumps(key)}: {_written(item, indent + 2)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{' ' * indent}}}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
