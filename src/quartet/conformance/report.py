"""The report of a conformance run: text for a terminal, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quartet import __version__
from quartet.conformance.check import CheckOutcome, CheckResult
from quartet.conformance.target import Target

_MARKS = {CheckOutcome.PASSED: "ok", CheckOutcome.FAILED: "FAILED", CheckOutcome.SKIPPED: "skipped"}


def line_of(result: CheckResult) -> str:
    """Return the line of a check, and the lines of its reason if it has not passed."""
    check = result.check
    lines = [f"{_MARKS[result.outcome]:8}{check.id:32}{check.requirement}"]
    if result.detail:
        lines.append(f"{'':8}{'':32}{result.detail}")
    if result.outcome is CheckOutcome.FAILED:
        lines.append(f"{'':8}{'':32}see {check.source}")
    return "\n".join(lines)


def summary_of(target: Target, results: Sequence[CheckResult]) -> str:
    """Return the last line of a report."""
    counts = Counter(result.outcome for result in results)
    numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in CheckOutcome if counts[outcome])
    verdict = "does not conform" if counts[CheckOutcome.FAILED] else "conforms"
    return f"{target.role} at {target.address} {verdict}: {numbers}"


def as_text(target: Target, results: Sequence[CheckResult]) -> str:
    """Return the whole report as text."""
    return "\n".join([*map(line_of, results), summary_of(target, results)])


def as_json(target: Target, results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the report as a JSON object."""
    counts = Counter(result.outcome for result in results)
    return {
        "role": str(target.role),
        "address": target.address,
        "quartet": __version__,
        "conforms": not counts[CheckOutcome.FAILED],
        "counts": {str(outcome): counts[outcome] for outcome in CheckOutcome},
        "checks": [
            {
                "id": result.check.id,
                "requirement": result.check.requirement,
                "source": result.check.source,
                "outcome": str(result.outcome),
                "detail": result.detail,
                "seconds": round(result.seconds, 4),
            }
            for result in results
        ],
    }
