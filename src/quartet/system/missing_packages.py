"""The packages of the extra `train`, which the base install leaves out."""

from __future__ import annotations

from quartet.errors import ConfigError

_PACKAGES = ("torch", "transformers", "peft", "tokenizers")


def explain_missing_package(error: ModuleNotFoundError) -> Exception:
    """Return a ConfigError that names the extra if one of its packages is missing; otherwise the error itself."""
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES:
        return error
    return ConfigError(f"the package {package} is not installed; install it with pip install 'quartet-rlhf[train]'")
