"""A check: what the contract requires, where it says so, and the code that holds a service to it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from quartet.conformance.target import Target

Subject = TypeVar("Subject")


class CheckOutcome(enum.StrEnum):
    """CheckOutcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of the contract.

    ``id`` is AREA.NAME. ``requirement`` is a sentence, and ``source`` the file that states it. ``run`` raises Violation or
    Skipped. ``changes_state``: the check trains, saves or generates.
    """

    id: str
    requirement: str
    source: str
    run: Callable[[Target], None]
    changes_state: bool = False


@dataclass(frozen=True, slots=True)
class CheckResult:
    """CheckOutcome of a check, the reason if it has not passed, and its duration in seconds."""

    check: Check
    outcome: CheckOutcome
    detail: str
    seconds: float


def within(
    opened: Callable[[Target], AbstractContextManager[Subject]], check: Callable[[Subject], None]
) -> Callable[[Target], None]:
    """Return a check of a target that opens what ``check`` needs, and closes it at the end."""

    def run(target: Target) -> None:
        with opened(target) as subject:
            check(subject)

    return run
