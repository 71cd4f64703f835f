"""``python -m tests.notebooks``: execute the notebooks of examples/ and store their outputs in them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat

from tests.notebooks.execution import NOTEBOOKS, execute

if __name__ == "__main__":
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
        print(f"notebook: {path}")
