"""What a process shows to those it calls, and asks of those who call it: certificates both ways, and a token.

Identities do not depend on addresses: the certificate of a process names each of its roles as ROLE.quartet, and whoever calls the
actor expects actor.quartet, wherever it listens.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import grpc
import structlog

from quartet.config import SecurityConfig
from quartet.errors import ConfigError
from quartet.rpc.call_observers import Metadata, Observer, Watched
from quartet.rpc.limits import CHANNEL_OPTIONS
from quartet.rpc.security.allow_list import CALLERS, OPERATOR, may_call
from quartet.secret_files import AUTHORITY, CERTIFICATE, KEY, read_token

log = structlog.get_logger()

DOMAIN = "quartet"
"""Names of processes end in it."""
_TOKEN = "authorization"


class Credentials:
    """Of one process. Nothing of them stands in its text."""

    def __init__(self, process: str, security: SecurityConfig | None = None) -> None:
        """``process`` names its folder among the certificates: its first role, or gateway, operator. Raises ConfigError."""
        security = security or SecurityConfig()
        self.folder = None if security.certificates is None else security.certificates / process
        self.allow_plaintext = security.allow_plaintext
        self._files = None if self.folder is None else tuple(map(_read, _paths(self.folder)))
        if self.folder is not None:
            _check(self.folder)
        token = None if security.token_file is None else read_token(security.token_file, "security.token_file")
        self._token = None if token is None else f"Bearer {token}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: the token, if there is one.

        Not added by an interceptor, which would make the method anew for each call: see ``ServiceChannel``.
        """
        return () if self._token is None else ((_TOKEN, self._token),)

    @property
    def encrypted(self) -> bool:
        """Whether calls are encrypted, and both sides known by their certificates."""
        return self._files is not None

    def channel(self, role: str, address: str) -> grpc.Channel:
        """A channel to the process of ``role`` at HOST:PORT. One of another role that answers there is not trusted."""
        if self._files is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        certificate, key, authority = self._files
        trusted = grpc.ssl_channel_credentials(authority, key, certificate)
        name = ("grpc.ssl_target_name_override", f"{role}.{DOMAIN}")
        return grpc.secure_channel(address, trusted, options=[*CHANNEL_OPTIONS, name])

    def listen(self, server: grpc.Server, address: str) -> int:
        """Has ``server`` listen at HOST:PORT. The port, or 0 where it cannot."""
        try:
            if self._files is None:
                return server.add_insecure_port(address)
            certificate, key, authority = self._files
            shown = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
            return server.add_secure_port(address, shown)
        except RuntimeError:
            return 0

    def refusal(self, method: str, context: grpc.ServicerContext) -> tuple[grpc.StatusCode, str] | None:
        """Why this caller may not call ``package.Service/Method``; None where they may."""
        if self._token is not None:
            shown = dict(context.invocation_metadata()).get(_TOKEN, "")
            if not hmac.compare_digest(str(shown).encode(), self._token.encode()):
                return grpc.StatusCode.UNAUTHENTICATED, "the token of these services is missing, or another one"
        if self._files is None:
            return None if method in CALLERS else (grpc.StatusCode.PERMISSION_DENIED, "nobody may call it")
        callers = _roles(cast("Iterable[bytes]", context.auth_context().get("x509_subject_alternative_name", ())))
        if may_call(callers, method):
            return None
        return grpc.StatusCode.PERMISSION_DENIED, f"{'+'.join(sorted(callers)) or 'a stranger'} may not call it"


LOCAL = Credentials(OPERATOR)
"""Of processes that trust everyone who reaches them: on loopback, where none but users of this machine do."""


class AccessControl(Observer):
    """Answers those who may call, and refuses all others once their request is read, before anything is done for them."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def watch(self, service: str, method: str, streams: bool, metadata: Metadata) -> Watched:
        """Lets the call go on, or ends it."""
        name = f"{service}/{method}"

        @contextmanager
        def admitted(context: grpc.ServicerContext) -> Iterator[None]:
            refusal = self._credentials.refusal(name, context)
            if refusal is not None:
                code, why = refusal
                log.warning("caller refused", method=name, peer=context.peer(), code=code.name, why=why)
                context.abort(code, why)
            yield

        return admitted


def _roles(names: Iterable[bytes]) -> frozenset[str]:
    """The processes that a certificate's alternative names name."""
    found = (name.decode(errors="replace").rpartition(".") for name in names)
    return frozenset(role for role, _, domain in found if domain == DOMAIN)


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    return folder / CERTIFICATE, folder / KEY, folder / AUTHORITY


def _check(folder: Path) -> None:
    """Raises ConfigError for what could be used to no end: gRPC itself says nothing, or something else."""
    from cryptography import x509

    certificate, key, authority = _paths(folder)
    try:
        context = ssl.create_default_context(cafile=str(authority))
        context.load_cert_chain(certificate, key)
        until = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or "malformed"
        raise ConfigError(
            f"security.certificates: {folder}: {certificate.name}, {key.name} and {authority.name} cannot be used ({reason}); "
            "quartet certificates makes a folder anew"
        ) from None
    if until < datetime.now(UTC):
        raise ConfigError(
            f"security.certificates: {certificate} has expired ({until:%Y-%m-%d %H:%M} UTC); quartet certificates makes a "
            "folder anew"
        )


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"security.certificates: {path} cannot be read ({error.strerror}); quartet certificates makes the folder"
        ) from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"security.certificates: {path} holds no PEM; quartet certificates makes the folder anew")
    return content
