"""The check of names and phrases refuses the example of each entry, and accepts plain text."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    """Import the script .ci/vocabulary as a module."""
    loader = importlib.machinery.SourceFileLoader("vocabulary", str(ROOT / ".ci" / "vocabulary"))
    spec = importlib.util.spec_from_loader("vocabulary", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vocabulary"] = module  # dataclasses look the module up.
    loader.exec_module(module)
    return module


def test_each_entry_refuses_its_example_in_the_line_where_it_is(vocabulary: Any) -> None:
    entries = vocabulary.read_entries()
    missed = [entry.refuse for entry in entries if entry.uses("quartet/new.py", f"first\n{entry.example}\n") != [2]]
    assert entries
    assert missed == []


def test_each_entry_says_what_to_use_instead_and_why(vocabulary: Any) -> None:
    assert [entry.refuse for entry in vocabulary.read_entries() if not (entry.instead and entry.reason)] == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Return whether the run is active."""',
        '"""KL penalty per token. Raises ConfigError if it is negative."""',
        "for folder, _, names in os.walk(root): ...",
        "the product of the ratios; the leader has the lease; of course; not found.",
    ],
)
def test_plain_text_passes(vocabulary: Any, text: str) -> None:
    assert [entry.refuse for entry in vocabulary.read_entries() if entry.uses("quartet/new.py", text)] == []


def test_a_line_with_a_reason_may_use_a_refused_word(vocabulary: Any) -> None:
    [entry, *_] = vocabulary.read_entries()
    assert entry.uses("new.md", f"{entry.example}  # vocabulary: allow - quotes the old name") == []
