"""`quartet conformance`: hold a service to the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import typer

from quartet.config import SecurityConfig
from quartet.conformance import ROLES, CheckOutcome, Limits, Target, as_json, checks_of, run_checks
from quartet.conformance.report import line_of, summary_of
from quartet.errors import ConfigError
from quartet.rpc.security.credentials import Credentials
from quartet.types import Role

CONNECT_SECONDS = 10.0
"""Time to connect to the service."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access to the service: folder of certificates, name of the certificate that the calls use, and file with a token."""

    certificates: Path | None = None
    identity: str = str(Role.ORCHESTRATOR)
    token_file: Path | None = None


def conformance(
    role: str, address: str, limits: Limits, access: Access, only: Sequence[str] = (), show_json: bool = False
) -> bool:
    """Run the checks and print the report. Return whether the service conforms.

    ``only``: ids of checks, or their beginnings. Raises ConfigError for a wrong argument, and if nothing listens at the address.
    """
    known = {str(each): each for each in ROLES}
    if role not in known:
        raise ConfigError(f"role {role}: expected one of {', '.join(known)}")
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"address {address}: expected HOST:PORT")
    if limits.fields is not None and not _is_json_object(limits.fields):
        raise ConfigError(f'--fields {limits.fields[:80]}: expected a JSON object, such as {{"answer": 1}}')
    checks = [check for check in checks_of(known[role]) if not only or any(check.id.startswith(each) for each in only)]
    if not checks:
        raise ConfigError(
            f"--only {', '.join(only)}: the {role} has no such check; expected an id, such as health.server"
        )
    security = SecurityConfig(certificates=access.certificates, token_file=access.token_file)
    target = Target(known[role], address, limits, Credentials(access.identity, security))
    try:
        _connect(target)
        results = run_checks(
            target, checks, (lambda _: None) if show_json else (lambda each: typer.echo(line_of(each)))
        )
        typer.echo(json.dumps(as_json(target, results), indent=2) if show_json else summary_of(target, results))
    finally:
        target.close()
    return all(result.outcome is not CheckOutcome.FAILED for result in results)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _connect(target: Target) -> None:
    """Raise ConfigError unless a gRPC server answers at the address."""
    try:
        grpc.channel_ready_future(target.channel).result(CONNECT_SECONDS)
    except grpc.FutureTimeoutError:
        raise ConfigError(
            f"address {target.address}: no gRPC server answers; start the service, or correct the address, --certificates "
            "and --identity"
        ) from None
