"""A tiny base model with a chat template, and pairs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.dialogue.conftest import programs as programs


@pytest.fixture(scope="session")
def toy(programs: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``base`` and ``data`` as examples/dialogue/tiny.py makes them."""
    folder = tmp_path_factory.mktemp("toy")
    arguments = [str(folder / "data"), str(folder / "base"), "--pairs", "160", "--vocabulary", "300"]
    assert programs["tiny"].main([*arguments, "--hidden", "16", "--layers", "1"]) == 0
    return folder
