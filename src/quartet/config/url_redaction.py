"""Passwords in URLs: replace them before a URL is printed or stored."""

from __future__ import annotations

import re
from urllib.parse import unquote

_PASSWORD_PATTERNS = (
    # Password of a user. The user name may contain "@", as an email address does.
    r"(://[^:/?#]*:)[^/?#]*(?=@)",
    # Up to the last @: an unescaped password may contain any of ":/@".
    r"(://[^:@]*:).*(?=@)",
    # Password in place of the port, if the host is missing.
    r"(://(?:[^/?#]*@)?(?:\[[^]]*\]|[^]:/?#@[]*):)(?![0-9]{1,5}(?:[/?#]|$)|[^/?#]*@).+",
    # Fragment.
    r"(://[^#]*#).+",
)
"""Parts of a URL, other than query options, that may hold a password. The first group of a match is kept."""


def redact_url(url: str) -> str:
    """Return the URL with ``***`` in place of its password and of any misplaced text that may be one."""
    for pattern in _PASSWORD_PATTERNS:
        url = re.sub(pattern, r"\1***", url, flags=re.DOTALL)
    return re.sub(r"(?<=[?&])([^?&=]*)=[^&#]*", _redact_option, url)


def _redact_option(option: re.Match[str]) -> str:
    name = "".join(unquote(option[1]).split()).lower()
    return f"{option[1]}=***" if "password" in name else option[0]


def is_redacted(url: str) -> bool:
    """Return whether ``redact_url`` has replaced a password in this URL."""
    return "***" in url and redact_url(url) == url
