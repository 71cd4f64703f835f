"""Commands of a model service: requests that all processes of its worker group run together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
CommandHandler = Callable[[Any], Any]
"""Function that runs a command from its request, a protobuf message."""


class Commands:
    """The commands of a service of one process. The base class of those of a group.

    Call the methods on the compute thread, or before and after it.
    """

    size = 1
    """Number of processes."""
    failure = ""
    """Error after which the processes may no longer be at the same place, so that only a restart helps."""

    def run(self, kind: str, request: Any, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``, which all processes do for the protobuf message ``request``."""
        return work()

    def stop(self) -> None:
        """End the other processes. Call it when no command runs."""
