"""Correct services pass every check, and each mutant fails the check that names its fault."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from quartet.config.deployment import SecurityConfig
from quartet.conformance import batch_checks
from quartet.conformance.check import CheckOutcome
from quartet.conformance.runner import AGENT, ROLES, checks_of, run_checks
from quartet.conformance.target import Limits, Target
from quartet.contract.status import Role
from quartet.rpc.security.certificates import Authority
from quartet.rpc.security.credentials import Credentials
from tests.conformance.check_table import PAGE, check_name, page
from tests.conformance.models import serving
from tests.conformance.mutants import MUTANTS, Mutant
from tests.conformance.server_mutants import ACCESS_MUTANTS


@pytest.mark.parametrize("role", [Role.REWARD, Role.REFERENCE, Role.CRITIC, Role.ACTOR, Role.ENVIRONMENT, AGENT])
def test_a_correct_service_passes_every_check(role: str, tmp_path: Path, redis_url: str) -> None:
    with serving(role, tmp_path, redis_url) as target:
        results = run_checks(target, checks_of(role))
    failed = {result.check.id: result.detail for result in results if result.outcome is CheckOutcome.FAILED}
    skipped = {result.check.id for result in results if result.outcome is CheckOutcome.SKIPPED}
    assert (failed, skipped) == ({}, {"tls.required", "tls.client_certificate", "tls.token"})


def test_there_are_at_least_forty_mutants() -> None:
    assert len(MUTANTS) >= 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_a_mutant_fails_the_check_that_names_its_fault(
    mutant: Mutant, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_checks, "STATUS_SECONDS", 0.5)
    checks = [check for check in checks_of(mutant.role) if check.id == mutant.check]
    with serving(mutant.role, tmp_path, redis_url, mutant.mutate, seconds=0.5) as target:
        [result] = run_checks(target, checks)
    assert result.outcome is CheckOutcome.FAILED, result.detail


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    """Certificates of a reward service and of its caller, and a token."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(timedelta(days=1))
    for process in (Role.REWARD, Role.ORCHESTRATOR):
        authority.issue(folder / process, [f"{process}.quartet"])
    (folder / "token").write_text("a" * 40)
    return SecurityConfig(certificates=folder, token_file=folder / "token")


@pytest.mark.parametrize(
    ("name", "check", "server"), ACCESS_MUTANTS, ids=[name.replace(" ", "_") for name, _, _ in ACCESS_MUTANTS]
)
def test_a_server_that_lets_callers_in_fails_the_check_that_names_it(
    name: str, check: str, server: Any, security: SecurityConfig, tmp_path: Path
) -> None:
    credentials = server(Role.REWARD, security)
    with serving(Role.REWARD, tmp_path, "", credentials=credentials) as plain:
        target = Target(Role.REWARD, plain.address, Limits(seconds=3.0), Credentials(Role.ORCHESTRATOR, security))
        with closing(target):
            [result] = run_checks(target, [each for each in checks_of(Role.REWARD) if each.id == check])
    assert result.outcome is CheckOutcome.FAILED, (name, result.detail)


def test_every_check_has_a_mutant() -> None:
    held = {check_name(mutant.check) for mutant in MUTANTS} | {check for _, check, _ in ACCESS_MUTANTS}
    missing = {check_name(check.id) for role in ROLES for check in checks_of(role)} - held
    assert missing == set()


def test_the_table_of_checks_and_mutants_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run make generate and commit"
