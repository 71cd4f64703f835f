"""Execution of notebooks in an empty folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """Return the notebook with the outputs of its cells, executed in ``folder``. Raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # Times, which would differ in every commit.
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook
