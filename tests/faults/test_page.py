"""The table of faults in docs/evidence/durability.md names existing tests, and every test of a fault."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults import test_messages, test_network, test_redis, test_slowness

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "docs/evidence/durability.md")
    .read_text(encoding="utf-8")
    .partition("\n## Other faults\n")[2]
    .partition("\n## ")[0]
)
NAMED = re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", SECTION)


def test_every_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 15
    for path, names in NAMED:
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert f"def test_{name}(" in text, f"{path}: {name}"


def test_the_page_names_every_test_of_a_fault() -> None:
    named = {name for _, names in NAMED for name in re.findall(r"\w+", names)}
    for module in (test_messages, test_network, test_redis, test_slowness):
        assert {name.removeprefix("test_") for name in vars(module) if name.startswith("test_")} <= named
