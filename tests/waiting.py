"""Wait for a condition of a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT = 240.0
"""Seconds after which a test that waits has failed. No test passes or fails by it unless something hangs, so a machine with other
load passes too. Below the limit of pytest for a whole test.
"""
Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], state: Callable[[], object] = lambda: "") -> Value:
    """Call ``condition`` until its value is true, and return that value.

    Raises AssertionError after ``LIMIT``. Its message contains ``state()``, which describes what the test waited for.
    """
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {state()}"
        time.sleep(0.01)
    return value
