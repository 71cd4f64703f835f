"""Passwords, tokens and certificates in files, as containers get them. Error messages never quote a secret."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from quartet.errors import ConfigError

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""File names in a process's folder of certificates, the same as in a Kubernetes TLS secret."""
MIN_TOKEN_LENGTH = 16
"""Minimum number of characters of a token."""
_MAX_SECRET_LENGTH = 4096
SECRET_VARIABLES = (
    "QUARTET_BUFFER_URL",
    "QUARTET_GATEWAY_TOKEN",
    "QUARTET_GATEWAY_VIEWER_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "TRACKIO_WRITE_TOKEN",
    "TRACKIO_SERVER_URL",
    "TRACKIO_WEBHOOK_URL",
    "SWANLAB_API_KEY",
    "SWANLAB_WEBHOOK",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
)
"""Environment variables with passwords or tokens. Processes that run functions of the user do not get them."""


def read_secret(path: Path, key: str) -> str:
    """Return the single line of the file. ``key`` is the config key, for error messages. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_SECRET_LENGTH + 1).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "failed") if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key} {path}: cannot be read ({reason}); give a file that this process may read") from None
    if not text or len(text) > _MAX_SECRET_LENGTH or not text.isprintable():
        raise ConfigError(f"{key} {path}: expected one line with the secret, of 1 to {_MAX_SECRET_LENGTH} characters")
    return text


def read_token(path: Path, key: str) -> str:
    """Return the token in the file. Raises ConfigError if it is easy to guess or cannot be sent in a header."""
    token = read_secret(path, key)
    check_token(token, f"{key} {path}")
    return token


def read_tokens(path: Path, key: str) -> list[str]:
    """Return the tokens in the file, one on each line. Empty lines and lines that start with # are left out.

    Raises ConfigError if there are none, or for one that ``check_token`` refuses.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or "failed") if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key} {path}: cannot be read ({reason}); give a file that this process may read") from None
    tokens = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")}
    if not tokens:
        raise ConfigError(f"{key} {path}: has no keys; write one on each line")
    for number, token in tokens.items():
        check_token(token, f"{key} {path}, line {number}")
    return list(tokens.values())


def check_token(token: str, where: str) -> None:
    """Raise ConfigError if a token is easy to guess or cannot be sent in a header."""
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{where}: has {len(token)} characters; expected at least {MIN_TOKEN_LENGTH}, ASCII letters, digits and punctuation "
            "without spaces"
        )


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise ConfigError unless ``gateway.certificate_file`` and ``gateway.key_file`` belong together and are valid today."""
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
