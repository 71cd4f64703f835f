"""Installed packages, and those of extras, which the base install leaves out."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

from quartet.errors import ConfigError

_EXTRAS = dict.fromkeys(("torch", "transformers", "peft", "tokenizers"), "train") | dict.fromkeys(
    ("trl", "accelerate"), "trl"
)
"""Extra of each package."""


def explain_missing_package(error: ModuleNotFoundError) -> Exception:
    """Return a ConfigError that names the extra if one of its packages is missing; otherwise the error itself."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return error
    return ConfigError(_missing(package, _EXTRAS[package]))


def require_package(package: str, extra: str) -> None:
    """Raise ConfigError if a package of an extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(_missing(package, extra))


def _missing(package: str, extra: str) -> str:
    return f"the package {package} is not installed; install it with pip install 'quartet-rlhf[{extra}]'"


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of a package, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
