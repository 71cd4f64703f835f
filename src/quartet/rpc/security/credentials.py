"""Authentication between processes: mutual TLS, and a shared token.

Identities do not depend on addresses. The certificate of a process names each of its roles as ROLE.quartet, and a caller of the
actor expects actor.quartet at any address.
"""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import grpc
import structlog

from quartet.config.deployment import SecurityConfig
from quartet.config.section import NAME_PATTERN
from quartet.errors import ConfigError, InvalidRequest
from quartet.rpc.call_interceptors import CallContext, CallInterceptor, Metadata
from quartet.rpc.limits import CHANNEL_OPTIONS
from quartet.rpc.security.allow_list import CALLERS, OPERATOR, may_call
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY, read_token

log = structlog.get_logger()

DOMAIN = "quartet"
"""Domain of the process names in certificates."""
_TOKEN = "authorization"
RUN = "quartet-run"
"""Key of the metadata with the name of the caller's run."""
RUN_NAME = re.compile(NAME_PATTERN)
_RUN_DOMAIN = f"run.{DOMAIN}"


class Credentials:
    """Credentials of one process. They never appear in its ``repr``."""

    def __init__(self, process: str, security: SecurityConfig | None = None, run: str = "") -> None:
        """``process`` is the name of its folder of certificates: its first role, gateway or operator. Raises ConfigError.

        ``run``: name of the run for which the process makes calls, or "".
        """
        security = security or SecurityConfig()
        self.folder = None if security.certificates is None else security.certificates / process
        self.allow_plaintext = security.allow_plaintext
        self._files = None if self.folder is None else tuple(map(_read, _paths(self.folder)))
        if self.folder is not None:
            _check(self.folder)
        token = None if security.token_file is None else read_token(security.token_file, "security.token_file")
        self._token = None if token is None else f"Bearer {token}"
        self._run = run

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call: the token and the name of the run, if there are any.

        A client interceptor would create the method again for each call, which is unsafe; see ``ServiceChannel``.
        """
        token = () if self._token is None else ((_TOKEN, self._token),)
        return (*token, (RUN, self._run)) if self._run else token

    @property
    def encrypted(self) -> bool:
        """Return whether calls use mutual TLS."""
        return self._files is not None

    def channel(self, role: str, address: str) -> grpc.Channel:
        """Return a channel to ``role`` at HOST:PORT. The connection fails if the server's certificate is for another role."""
        if self._files is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        certificate, key, authority = self._files
        trusted = grpc.ssl_channel_credentials(authority, key, certificate)
        name = ("grpc.ssl_target_name_override", f"{role}.{DOMAIN}")
        return grpc.secure_channel(address, trusted, options=[*CHANNEL_OPTIONS, name])

    def listen(self, server: grpc.Server, address: str) -> int:
        """Bind ``server`` to HOST:PORT. Return the port, or 0 if that fails."""
        try:
            if self._files is None:
                return server.add_insecure_port(address)
            certificate, key, authority = self._files
            own = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
            return server.add_secure_port(address, own)
        except RuntimeError:
            return 0

    def refusal(
        self, method: str, context: grpc.ServicerContext, allowed: Mapping[str, frozenset[str]] = CALLERS
    ) -> tuple[grpc.StatusCode, str] | None:
        """Return why the caller may not call ``package.Service/Method``, or None if it may. ``allowed``: callers by method."""
        if self._token is not None:
            sent = dict(context.invocation_metadata()).get(_TOKEN, "")
            if not hmac.compare_digest(str(sent).encode(), self._token.encode()):
                return grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong"
        if self._files is None:
            return None if method in allowed else (grpc.StatusCode.PERMISSION_DENIED, "no caller is allowed")
        callers = _roles(cast("Iterable[bytes]", context.auth_context().get("x509_subject_alternative_name", ())))
        if may_call(callers, method, allowed):
            return None
        return grpc.StatusCode.PERMISSION_DENIED, f"{'+'.join(sorted(callers)) or 'an unknown caller'} is not allowed"


def caller_run(context: grpc.ServicerContext) -> str:
    """Return the name of the caller's run; "" if it gives none.

    A certificate may name runs, as NAME.run.quartet. Then it decides: the caller must give one of them, or there must be one
    only. Raises InvalidRequest.
    """
    sent = str(dict(context.invocation_metadata()).get(RUN, ""))
    names = cast("Iterable[bytes]", context.auth_context().get("x509_subject_alternative_name", ()))
    suffix = f".{_RUN_DOMAIN}"
    allowed = sorted({text.removesuffix(suffix) for text in map(_decoded, names) if text.endswith(suffix)})
    if not allowed:
        if sent and not RUN_NAME.fullmatch(sent):
            raise InvalidRequest(
                f"metadata {RUN}: expected the name of a run: up to 64 letters, digits, '.', '_' and '-'"
            )
        return sent
    if sent in allowed or (not sent and len(allowed) == 1):
        return sent or allowed[0]
    raise InvalidRequest(f"metadata {RUN} {sent!r}: the certificate of the caller is for run {', '.join(allowed)}")


def _decoded(name: bytes) -> str:
    return name.decode(errors="replace")


LOCAL = Credentials(OPERATOR)
"""Credentials without certificates and token, for loopback addresses: only users of this machine can connect."""


class AccessControl(CallInterceptor):
    """Interceptor that refuses unauthorized callers before a method runs."""

    def __init__(self, credentials: Credentials, allowed: Mapping[str, frozenset[str]] = CALLERS) -> None:
        """``allowed``: the processes that may call each method."""
        self._credentials, self._allowed = credentials, allowed

    def context_of(self, service: str, method: str, metadata: Metadata) -> CallContext:
        """Return a function that ends the call if the caller may not make it, or None."""
        name = f"{service}/{method}"

        @contextmanager
        def admitted(context: grpc.ServicerContext) -> Iterator[None]:
            refusal = self._credentials.refusal(name, context, self._allowed)
            if refusal is not None:
                code, reason = refusal
                log.warning("caller refused", method=name, caller=context.peer(), code=code.name, reason=reason)
                context.abort(code, reason)
            yield

        return admitted


def _roles(names: Iterable[bytes]) -> frozenset[str]:
    """Return the process names among the alternative names of a certificate."""
    parts = (_decoded(name).rpartition(".") for name in names)
    return frozenset(role for role, _, domain in parts if domain == DOMAIN)


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / CERTIFICATE, folder / KEY, folder / AUTHORITY


def _check(folder: Path) -> None:
    """Raise ConfigError for unusable or expired files: gRPC itself would fail later with an unclear message."""
    from cryptography import x509

    certificate, key, authority = _paths(folder)
    try:
        context = ssl.create_default_context(cafile=str(authority))
        context.load_cert_chain(certificate, key)
        expiry = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or "malformed"
        raise ConfigError(
            f"security.certificates: {folder}: {certificate.name}, {key.name} and {authority.name} cannot be used ({reason}); "
            "quartet certificates creates a new folder"
        ) from None
    if expiry < datetime.now(UTC):
        raise ConfigError(
            f"security.certificates: {certificate} has expired ({expiry:%Y-%m-%d %H:%M} UTC); "
            "quartet certificates creates a new folder"
        )


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.certificates: {path} cannot be read ({error.strerror}); quartet certificates creates the folder"
        ) from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"security.certificates: {path} is not a PEM file; quartet certificates creates a new folder")
    return content
