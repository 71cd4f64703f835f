"""What the checks of a config and of this machine find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from quartet.errors import ConfigError, QuartetError, ServiceFailed


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    ``where``: the setting with its value, or a part of the machine. ``what``: what is there and, if that is a problem, what was
    expected and what to do.
    """

    level: Literal["ok", "warning", "error"]
    where: str
    what: str
    kind: type[QuartetError] = ConfigError
    """Class of an error."""

    def __str__(self) -> str:
        return f"{'warning: ' if self.level == 'warning' else ''}{self.where}: {self.what}"


def collect(check: Callable[..., Iterable[Finding] | None], *arguments: object) -> list[Finding]:
    """Return the findings of a check. An error that it raises ends it and is the last of them."""
    found: list[Finding] = []
    try:
        found.extend(check(*arguments) or ())
    except QuartetError as error:
        where, _, what = str(error).partition(": ")
        found.append(Finding("error", where, what, type(error)))
    return found


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether a run cannot start."""
    return any(finding.level == "error" for finding in findings)


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise all errors together: as ConfigError if the user can fix one, in its class if all have the same."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        kinds = {error.kind for error in errors}
        fixable = any(issubclass(kind, ConfigError) for kind in kinds)
        kind = kinds.pop() if len(kinds) == 1 else ConfigError if fixable else ServiceFailed
        raise kind("\n  ".join([f"{len(errors)} problems:"] * (len(errors) > 1) + [str(error) for error in errors]))
