"""Keeps transformers from writing to the terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and load reports: what matters of them is raised."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
