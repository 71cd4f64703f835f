"""`python helm/values_schema.py`: compare the chart's generated files with the code; with --write, write them.

Generated are `config` in values.schema.json, from the config tree, and files/estimators.json, from the table of estimators. The rest
of values.schema.json is written by hand.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

from quartet.config import json_schema
from quartet.config.estimators import BUILT_IN_ESTIMATORS

SCHEMA = Path(__file__).parent / "quartet/values.schema.json"
ESTIMATORS = Path(__file__).parent / "quartet/files/estimators.json"
WIDTH = 115
"""Of what stands in one line, without its key."""


def main(arguments: list[str]) -> int:
    """Exit status: 0 where the schema is that of the tree, 1 where it differs."""
    if arguments not in ([], ["--write"]):
        print("usage: python helm/values_schema.py [--write]", file=sys.stderr)
        return 2
    differs = False
    for path, now in ((SCHEMA, generated(SCHEMA.read_text(encoding="utf-8"))), (ESTIMATORS, estimators())):
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        if arguments:
            path.write_text(now, encoding="utf-8")
        elif kept != now:
            differs = True
            lines = difflib.unified_diff(kept.splitlines(True), now.splitlines(True), f"{path.name}, kept", "now")
            sys.stdout.writelines(lines)
            print(f"error: {path.name} of the chart differs, see above; run make helm-schema, commit", file=sys.stderr)
    return int(differs)


def estimators() -> str:
    """The names of the built-in estimators that need a critic, for the chart's templates."""
    with_critic = [spec.name for spec in BUILT_IN_ESTIMATORS.values() if spec.needs_critic]
    return json.dumps({"with_critic": with_critic}) + "\n"


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
