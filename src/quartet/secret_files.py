"""Passwords, tokens and certificates in files, as containers get them. What is wrong with one is said without quoting it."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from quartet.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""Files in a process's folder of certificates: as a Kubernetes TLS secret has them."""
MIN_TOKEN = 16
"""Characters that a token has at least."""
_LONGEST = 4096


def read_secret(path: Path, key: str) -> str:
    """The file's one line. ``key`` is the config's, for messages. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LONGEST + 1).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "failed") if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key} {path}: cannot be read ({reason}); give a file that this process may read") from None
    if not text or len(text) > _LONGEST or not text.isprintable():
        raise ConfigError(f"{key} {path}: expected one line with the secret, of 1 to {_LONGEST} characters")
    return text


def read_token(path: Path, key: str) -> str:
    """As ``read_secret``, for a token. Raises ConfigError for one that could be guessed or could not be sent."""
    token = read_secret(path, key)
    check_token(token, f"{key} {path}")
    return token


def check_token(token: str, where: str) -> None:
    """Raises ConfigError for a token that could be guessed or could not be sent."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where}: has {len(token)} characters; expected at least {MIN_TOKEN}, letters, digits and signs without spaces"
        )


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises ConfigError unless ``gateway.certificate_file`` and ``gateway.key_file`` belong together and are good today."""
    from cryptography import x509

    where = f"gateway.certificate_file {certificate}, gateway.key_file {key}"
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
        until = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: cannot be used ({reason}); give two PEM files that belong together") from None
    if until < datetime.now(UTC):
        raise ConfigError(f"{where}: has expired ({until:%Y-%m-%d %H:%M} UTC); give one that is good")
