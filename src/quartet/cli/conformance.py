"""`quartet conformance`: hold a service to the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from quartet.buffer.connection import connect as connect_buffer
from quartet.config.deployment import SecurityConfig
from quartet.conformance.check import CheckOutcome
from quartet.conformance.connection import connect, host_and_port
from quartet.conformance.report import as_json, header_of, line_of, summary_of
from quartet.conformance.runner import AGENT, ROLES, checks_of, run_checks
from quartet.conformance.target import Limits, Target
from quartet.contract.status import Role
from quartet.errors import ConfigError, ServiceUnavailable
from quartet.rpc.security.credentials import Credentials

PLAYERS = str(Role.ACTOR)
"""Certificate of the calls of episodes: the processes that generate make them."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the service: folder of certificates, name of the certificate that the calls use, and file with a token.

    Without ``identity``, the calls use the certificate of a process that makes them in a run.
    """

    certificates: Path | None = None
    identity: str | None = None
    token_file: Path | None = None


def conformance(
    role: str, address: str, limits: Limits, access: Access, only: Sequence[str] = (), show_json: bool = False
) -> bool:
    """Run the checks and print the report. Return whether the service conforms.

    ``only``: ids of checks, or their beginnings. Raises ConfigError for a wrong argument, and if nothing listens at the address.
    """
    if role not in ROLES:
        raise ConfigError(f"role {role}: expected one of {', '.join(ROLES)}")
    host_and_port(address)
    for option, fields in (("--fields", limits.fields), ("--failing-fields", limits.failing_fields)):
        if fields is not None and not _is_json_object(fields):
            raise ConfigError(f'{option} {fields[:80]}: expected a JSON object, such as {{"answer": 1}}')
    checks = [check for check in checks_of(role) if not only or any(check.id.startswith(each) for each in only)]
    if not checks:
        raise ConfigError(
            f"--only {', '.join(only)}: the {role} has no such check; expected an id, such as health.server"
        )
    target = _target(Role.ENVIRONMENT if role == AGENT else Role(role), address, limits, access)
    try:
        connect(target)
        if limits.buffer_url is not None:
            _check_buffer(limits.buffer_url)
        started = datetime.now(UTC)
        if show_json:
            results = run_checks(target, checks)
            typer.echo(json.dumps(as_json(target, results, started), indent=2))
        else:
            typer.echo(header_of(started))
            results = run_checks(target, checks, lambda each: typer.echo(line_of(each)))
            typer.echo(summary_of(target, results))
    finally:
        target.close()
    return all(result.outcome is not CheckOutcome.FAILED for result in results)


def _target(role: Role, address: str, limits: Limits, access: Access) -> Target:
    """Return the target. Raises ConfigError for certificates or a token that cannot be read."""
    security = SecurityConfig(certificates=access.certificates, token_file=access.token_file)
    orchestrator = str(Role.ORCHESTRATOR)
    caller = Credentials(access.identity or (PLAYERS if role is Role.ENVIRONMENT else orchestrator), security)
    watcher = caller if access.identity or role is not Role.ENVIRONMENT else Credentials(orchestrator, security)
    return Target(role, address, limits, caller, watcher)


def _check_buffer(url: str) -> None:
    """Raise ConfigError unless the buffer answers."""
    try:
        connect_buffer(url).close()
    except ServiceUnavailable as error:
        raise ConfigError(f"--buffer: {error}") from None


def token_ids(text: str | None) -> tuple[int, ...]:
    """Return the token ids of --distinct-response. Raises ConfigError."""
    if text is None:
        return ()
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids or any(type(each) is not int or not 0 <= each < 2**31 for each in ids):
        raise ConfigError(f"--distinct-response {text[:80]}: expected token ids as a JSON list, such as [12, 7]")
    return tuple(ids)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
