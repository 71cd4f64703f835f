"""The packages of the extra `verifiers`, which the base install leaves out."""

from __future__ import annotations

import importlib.util

from quartet.errors import ConfigError


def require(package: str) -> None:
    """Raise ConfigError if a package of the extra is missing. Called on import, so that the check of a config reports it."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the package {package} is not installed; install it with pip install 'quartet-rlhf[verifiers]'"
        )
