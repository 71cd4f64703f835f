"""The report of a conformance run: text for a terminal, and JSON. See docs/conformance.md for the JSON."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from quartet import __version__
from quartet.conformance.check import CheckOutcome, CheckResult
from quartet.conformance.target import Target
from quartet.v1 import (
    actor_pb2,
    critic_pb2,
    environment_pb2,
    experience_pb2,
    generation_pb2,
    reference_pb2,
    reward_pb2,
    status_pb2,
    tensor_pb2,
    trajectory_pb2,
    update_pb2,
    weights_pb2,
)

_MARKS = {CheckOutcome.PASSED: "ok", CheckOutcome.FAILED: "FAILED", CheckOutcome.SKIPPED: "skipped"}
CONTRACT = "quartet.v1"
"""Protobuf package of the contract."""
_MESSAGES = (
    actor_pb2,
    critic_pb2,
    environment_pb2,
    experience_pb2,
    generation_pb2,
    reference_pb2,
    reward_pb2,
    status_pb2,
    tensor_pb2,
    trajectory_pb2,
    update_pb2,
    weights_pb2,
)


def contract_digest() -> str:
    """Return 12 hexadecimal digits that change if a message or a method of the contract changes."""
    digest = hashlib.sha256()
    for module in _MESSAGES:
        digest.update(module.DESCRIPTOR.serialized_pb)
    return digest.hexdigest()[:12]


def line_of(result: CheckResult) -> str:
    """Return the line of a check, and the lines of its reason if it has not passed."""
    check = result.check
    lines = [f"{_MARKS[result.outcome]:8}{check.id:32}{check.requirement}"]
    if result.detail:
        lines.append(f"{'':8}{'':32}{result.detail}")
    if result.outcome is CheckOutcome.FAILED:
        lines.append(f"{'':8}{'':32}see {check.source}")
    return "\n".join(lines)


def header_of(started: datetime) -> str:
    """Return the first line of a report: the contract, the version of the checks, and the time, which has a time zone."""
    return f"contract {CONTRACT} {contract_digest()}, quartet {__version__}, {_shown(started)}"


def _not_shown(results: Sequence[CheckResult]) -> dict[str, list[str]]:
    """Return the ids of the skipped checks by reason. The report shows nothing about what they require."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.outcome is CheckOutcome.SKIPPED:
            reasons.setdefault(result.detail, []).append(result.check.id)
    return reasons


def summary_of(target: Target, results: Sequence[CheckResult]) -> str:
    """Return the last lines of a report: the checks that were not shown with their reasons, and the verdict."""
    lines = [f"        {', '.join(checks)}: {reason}" for reason, checks in _not_shown(results).items()]
    if lines:
        skipped = sum(result.outcome is CheckOutcome.SKIPPED for result in results)
        lines.insert(0, f"not shown: {skipped} of {len(results)} checks")
    counts = Counter(result.outcome for result in results)
    numbers = ", ".join(f"{counts[outcome]} {outcome}" for outcome in CheckOutcome if counts[outcome])
    verdict = "does not conform" if counts[CheckOutcome.FAILED] else "conforms"
    return "\n".join([*lines, f"{target.role} at {target.address} {verdict}: {numbers}"])


def as_json(target: Target, results: Sequence[CheckResult], started: datetime) -> dict[str, Any]:
    """Return the report as a JSON object."""
    counts = Counter(result.outcome for result in results)
    return {
        "format": 1,
        "contract": CONTRACT,
        "contract_digest": contract_digest(),
        "quartet": __version__,
        "started": _shown(started),
        "seconds": round(sum(result.seconds for result in results), 3),
        "role": str(target.role),
        "address": target.address,
        "service_version": target.version(),
        "conforms": not counts[CheckOutcome.FAILED],
        "counts": {str(outcome): counts[outcome] for outcome in CheckOutcome},
        "not_shown": [{"reason": reason, "checks": checks} for reason, checks in _not_shown(results).items()],
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


def _shown(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
