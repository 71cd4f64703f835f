"""Run the checks of a role against a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from quartet.conformance.agent_checks import agent_checks
from quartet.conformance.batch_checks import batch_checks
from quartet.conformance.check import Check, CheckOutcome, CheckResult
from quartet.conformance.environment_checks import environment_checks
from quartet.conformance.generation_checks import generation_checks
from quartet.conformance.model_checks import (
    ACTOR_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    SCORE,
    VALUES,
    actor_checks,
    reference_checks,
    reward_checks,
    values_checks,
)
from quartet.conformance.outcome import Skipped, Violation
from quartet.conformance.process_checks import process_checks
from quartet.conformance.target import Target
from quartet.conformance.update_checks import update_checks
from quartet.contract.status import Role

AGENT = "agent"
"""Name of the environment service that runs agents, in the place of a role."""
_CHECKS: dict[str, Callable[[], list[Check]]] = {
    Role.REWARD: lambda: [*batch_checks(SCORE), *reward_checks()],
    Role.REFERENCE: lambda: [*batch_checks(REFERENCE_LOG_PROBS), *reference_checks()],
    Role.CRITIC: lambda: [*batch_checks(VALUES), *values_checks(), *update_checks()],
    Role.ACTOR: lambda: [*batch_checks(ACTOR_LOG_PROBS), *actor_checks(), *generation_checks(), *update_checks()],
    Role.GENERATOR: generation_checks,
    Role.ENVIRONMENT: environment_checks,
    AGENT: agent_checks,
}
ROLES = tuple(_CHECKS)
"""Roles that have checks, and AGENT."""


def checks_of(role: str) -> list[Check]:
    """Return the checks of one of ROLES, in the order in which they run."""
    # No tokens reach agents.
    common = [check for check in process_checks() if role != AGENT or check.id != "status.vocabulary"]
    return [*common, *_CHECKS[role]()]


def run_checks(
    target: Target, checks: Sequence[Check], on_result: Callable[[CheckResult], None] = lambda _: None
) -> list[CheckResult]:
    """Run checks one after the other, and return their results. ``on_result`` gets each at once.

    A check that changes the state of the service is skipped unless the limits of the target allow it.
    """
    return list(_results(target, checks, on_result))


def _results(
    target: Target, checks: Sequence[Check], on_result: Callable[[CheckResult], None]
) -> Iterable[CheckResult]:
    for check in checks:
        started = time.perf_counter()
        outcome, detail = _run(target, check)
        result = CheckResult(check, outcome, detail, time.perf_counter() - started)
        on_result(result)
        yield result


def _run(target: Target, check: Check) -> tuple[CheckOutcome, str]:
    if check.changes_state and not target.limits.allow_changes:
        return CheckOutcome.SKIPPED, "changes the state of the service; give --allow-changes"
    try:
        check.run(target)
    except Violation as violation:
        return CheckOutcome.FAILED, str(violation)
    except Skipped as skipped:
        return CheckOutcome.SKIPPED, str(skipped)
    return CheckOutcome.PASSED, ""
