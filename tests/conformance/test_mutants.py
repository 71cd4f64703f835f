"""Correct services pass every check, and each mutant fails the check that names its fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from quartet.conformance import CheckOutcome, checks_of, run_checks
from quartet.types import Role
from tests.conformance.models import serving
from tests.conformance.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("role", [Role.REWARD, Role.REFERENCE, Role.CRITIC, Role.ACTOR, Role.ENVIRONMENT])
def test_a_correct_service_passes_every_check(role: Role, tmp_path: Path, redis_url: str) -> None:
    with serving(role, tmp_path, redis_url) as target:
        results = run_checks(target, checks_of(role))
    failed = {result.check.id: result.detail for result in results if result.outcome is CheckOutcome.FAILED}
    skipped = {result.check.id for result in results if result.outcome is CheckOutcome.SKIPPED}
    assert (failed, skipped) == ({}, {"tls.required", "tls.client_certificate", "tls.token"})


def test_there_are_at_least_forty_mutants() -> None:
    assert len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_mutant_fails_the_check_that_names_its_fault(mutant: Mutant, tmp_path: Path, redis_url: str) -> None:
    checks = [check for check in checks_of(mutant.role) if check.id == mutant.check]
    with serving(mutant.role, tmp_path, redis_url, mutant.mutate) as target:
        [result] = run_checks(target, checks)
    assert result.outcome is CheckOutcome.FAILED, result.detail
