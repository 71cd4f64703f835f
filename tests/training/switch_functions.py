"""Reward functions of the tests of shadows and switches. The function worker imports this module."""

from __future__ import annotations

import os
import time
from typing import Any


class Refused(Exception):
    """An exception that names its outcome."""

    outcome = "refused"


def length(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return a quarter of the number of words."""
    return len(response.split()) / 4


def letters(prompt: str, response: str, fields: dict[str, Any]) -> float:
    """Return the number of letters, on another scale than ``length``."""
    return 10.0 * sum(letter in "aeiou" for letter in response)


def faulty(prompt: str, response: str, fields: dict[str, Any], fault: str) -> float:
    """Fail for every second response."""
    if len(response) % 2:
        return 1.0
    if fault == "raise":
        raise ValueError("no")
    if fault == "refuse":
        raise Refused
    if fault == "exit":
        os._exit(3)
    if fault == "hang":
        time.sleep(60)
    return float(fault)
