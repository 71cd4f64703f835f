"""The URL of the rollout buffer, with password and certificates."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.system.secret_files import AUTHORITY, CERTIFICATE, KEY, read_secret

BUFFER_URL_VARIABLE = "QUARTET_BUFFER_URL"
"""Environment variable that replaces ``buffer.url`` and, if its URL has a password, ``buffer.password_file``."""


def environment_overrides() -> list[str]:
    """Return the config overrides that the environment gives for the buffer."""
    url = os.environ.get(BUFFER_URL_VARIABLE)
    if not url:
        return []
    return [f"buffer.url={url}", *(["buffer.password_file=null"] if _has_password(url) else [])]


def buffer_url(config: Config, certificates: Path | None = None) -> str | None:
    """Return ``buffer.url`` with the password of ``buffer.password_file`` and, for rediss://, this process's certificates.

    ``certificates`` is the folder of the process's certificates. Return None if the run starts an embedded server. Raises
    ConfigError.
    """
    url = config.buffer.url
    if url is None:
        if config.buffer.password_file is not None:
            raise ConfigError(
                "buffer.password_file: is for a Redis at buffer.url, which is null; set buffer.url, or remove it"
            )
        return None
    if config.buffer.password_file is not None:
        url = _with_password(url, read_secret(config.buffer.password_file, "buffer.password_file"))
    return _with_certificates(url, certificates) if certificates is not None and url.startswith("rediss://") else url


def required_buffer_url(config: Config, certificates: Path | None = None) -> str:
    """Return the URL of the buffer. Raises ConfigError without one: only `quartet train` starts an embedded server."""
    url = buffer_url(config, certificates)
    if url is None:
        raise ConfigError(
            "buffer.url: null; a separately started service needs the Redis of the other services: set buffer.url, "
            "or the environment variable QUARTET_BUFFER_URL"
        )
    return url


def _with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if _has_password(url):
        raise ConfigError("buffer.password_file: buffer.url contains a password too; give only one of them")
    netloc = f"{user}:{quote(password, safe='')}@{host if at else parts.netloc}"
    return urlunsplit(parts._replace(netloc=netloc))


def _has_password(url: str) -> bool:
    return ":" in urlsplit(url).netloc.rpartition("@")[0]


def _with_certificates(url: str, folder: Path) -> str:
    if "ssl_" in urlsplit(url).query:
        return url  # The user has chosen other certificates.
    files = {"ssl_ca_certs": AUTHORITY, "ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}
    query = urlencode({option: str(folder / name) for option, name in files.items()})
    return f"{url}{'&' if '?' in url else '?'}{query}"
