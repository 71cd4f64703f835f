"""Freezing of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from quartet.errors import ModelError

_EXAMPLES = 6


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name matches one of the shell patterns (``*.layers.0.*``).

    A weight that two layers share (tied) has both names and is frozen if either matches. Raises ModelError if a pattern matches
    nothing, or if every parameter would be frozen.
    """
    if not patterns:
        return
    parameters = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [parameter for name, parameter in parameters if fnmatchcase(name, pattern)]
        if not matching:
            raise ModelError(
                f"freeze {pattern!r}: matches no parameter of {type(model).__name__}; parameters are, for example, "
                f"{_examples([name for name, _ in parameters])}"
            )
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"freeze {', '.join(map(repr, patterns))}: every parameter of {type(model).__name__} is frozen, so nothing can be "
            f"trained; keep some trainable, for example {_examples([name for name, _ in parameters])}"
        )


def _examples(names: Sequence[str]) -> str:
    """Return a few names, spread over the model."""
    return ", ".join(names[:: max(1, len(names) // _EXAMPLES)][:_EXAMPLES])
