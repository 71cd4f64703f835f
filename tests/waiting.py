"""Wait for a condition of a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(
    condition: Callable[[], Value], seconds: float = 30.0, state: Callable[[], object] = lambda: ""
) -> Value:
    """Call ``condition`` until its value is true, and return that value.

    Raises AssertionError after ``seconds``. Its message contains ``state()``, which describes what the test waited for.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {state()}"
        time.sleep(0.01)
    return value
