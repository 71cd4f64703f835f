"""Wait for a condition of a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(
    condition: Callable[[], Value], seconds: float = 20.0, state: Callable[[], object] = lambda: ""
) -> Value:
    """Return the first true value of ``condition``. Raises AssertionError with ``state()`` if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {state()}"
        time.sleep(0.01)
    return value
