"""Suppression of transformers' progress bars and load reports."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import transformers

_lock = threading.Lock()
_inside = 0
_restore: list[Callable[[], None]] = []


@contextlib.contextmanager
def suppress_hf_logging() -> Iterator[None]:
    """Suppress progress bars and load reports of transformers. Errors are raised as usual. Several threads may enter at once."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside
    logging: Any = transformers.utils.logging
    with _lock:
        _inside += 1
        # The settings belong to the process: the last thread to leave restores what the first one replaced.
        if _inside == 1:
            level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
            _restore.append(lambda: logging.set_verbosity(level))
            if bars:
                _restore.append(logging.enable_progress_bar)
            logging.set_verbosity_error()
            logging.disable_progress_bar()


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        while not _inside and _restore:
            _restore.pop()()
