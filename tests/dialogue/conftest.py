"""The programs of examples/dialogue as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/dialogue"
PROGRAMS = ("prepare", "tiny")


@pytest.fixture(scope="session")
def programs() -> dict[str, ModuleType]:
    """Import the programs as Python finds them when a user runs one: from their folder."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return {name: importlib.import_module(name) for name in PROGRAMS}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in PROGRAMS:
            sys.modules.pop(name, None)
