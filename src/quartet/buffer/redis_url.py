"""Where a process finds the rollout buffer, with all that it needs to get in."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from quartet.config import Config
from quartet.errors import ConfigError
from quartet.secret_files import AUTHORITY, CERTIFICATE, KEY, read_secret

BUFFER_URL_VARIABLE = "QUARTET_BUFFER_URL"
"""Of the environment: takes the place of ``buffer.url``, and where it has a password, of ``buffer.password_file``."""


def environment_overrides() -> list[str]:
    """What the environment says of the buffer, as overrides of a config."""
    url = os.environ.get(BUFFER_URL_VARIABLE)
    if not url:
        return []
    return [f"buffer.url={url}", *(["buffer.password_file=null"] if _has_password(url) else [])]


def buffer_url(config: Config, certificates: Path | None = None) -> str | None:
    """``buffer.url`` with the password of ``buffer.password_file`` and, with rediss://, this process's certificates.

    ``certificates``: the process's own folder of them. None where the run is to start a server of its own. Raises ConfigError.
    """
    url = config.buffer.url
    if url is None:
        if config.buffer.password_file is not None:
            raise ConfigError(
                "buffer.password_file: is for a Redis at buffer.url, which is null; give the url, or leave it out"
            )
        return None
    if config.buffer.password_file is not None:
        url = _with_password(url, read_secret(config.buffer.password_file, "buffer.password_file"))
    return _with_certificates(url, certificates) if certificates is not None and url.startswith("rediss://") else url


def required_buffer_url(config: Config, certificates: Path | None = None) -> str:
    """The buffer's address. Raises ConfigError without one: only `quartet` starts an embedded server."""
    url = buffer_url(config, certificates)
    if url is None:
        raise ConfigError(
            "buffer.url: null; a service started by itself needs the Redis that the others use: set buffer.url, "
            "or the environment variable QUARTET_BUFFER_URL"
        )
    return url


def _with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if _has_password(url):
        raise ConfigError("buffer.password_file: buffer.url has a password, too; give it in one of them")
    netloc = f"{user}:{quote(password, safe='')}@{host if at else parts.netloc}"
    return urlunsplit(parts._replace(netloc=netloc))


def _has_password(url: str) -> bool:
    return ":" in urlsplit(url).netloc.rpartition("@")[0]


def _with_certificates(url: str, folder: Path) -> str:
    if "ssl_" in urlsplit(url).query:
        return url  # Its user has other ones.
    files = {"ssl_ca_certs": AUTHORITY, "ssl_certfile": CERTIFICATE, "ssl_keyfile": KEY}
    query = urlencode({option: str(folder / name) for option, name in files.items()})
    return f"{url}{'&' if '?' in url else '?'}{query}"
