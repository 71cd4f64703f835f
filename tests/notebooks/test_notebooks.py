"""The notebooks of examples/ work, and their stored outputs are complete and show nothing of the machine."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.execution import NOTEBOOKS, execute


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def output_of(cell: nbformat.NotebookNode) -> str:
    """Return the text that a cell has printed or returned."""
    return "".join(item.get("text", "") or item.get("data", {}).get("text/plain", "") for item in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_stored_outputs_are_complete_and_name_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?:/home|/tmp|/root|/Users|/work|/opt|site-packages)/[^\"\\ ]*|token=", text)
    assert "Traceback" not in text


@pytest.mark.slow
def test_the_quickstart_trains_and_shows_a_gain(tmp_path: Path) -> None:
    [path] = [path for path in NOTEBOOKS if path.name == "quickstart.ipynb"]
    cells = code_cells(execute(path, tmp_path))
    stored = code_cells(nbformat.read(path, as_version=4))
    for cell, before in zip(cells, stored, strict=True):
        assert bool(cell.outputs) == bool(before.outputs), cell.source
    [gain] = re.findall(r"reward: (\S+) in the first 5 steps, (\S+) in the last 5", "".join(map(output_of, cells)))
    assert float(gain[1]) > float(gain[0]) + 0.3
    assert (tmp_path / "runs" / "quickstart" / "policy" / "config.json").is_file()
