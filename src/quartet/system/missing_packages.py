"""Installed packages, and those of extras, which the base install leaves out."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

from quartet.errors import ConfigError

_PACKAGES = ("torch", "transformers", "peft", "tokenizers")


def explain_missing_package(error: ModuleNotFoundError) -> Exception:
    """Return a ConfigError that names the extra if one of its packages is missing; otherwise the error itself."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    return ConfigError(f"the package {package} is not installed; install it with pip install 'quartet-rlhf[train]'")


def require_verifier_package(package: str) -> None:
    """Raise ConfigError if a package of the extra is missing. Called on import, so that the check of a config reports it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the package {package} is not installed; install it with pip install 'quartet-rlhf[verifiers]'"
        )


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of a package, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
