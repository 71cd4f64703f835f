"""Limits of one program in the sandbox."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MEBIBYTE = 1024 * 1024
START_SECONDS = 60.0
"""Maximum seconds until the sandbox runs. Longer is a failure of the sandbox, not of the program."""
END_SECONDS = 30.0
"""Maximum seconds until a killed sandbox has ended."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run of a program. A run is one test, or one process that answers the calls of several tests."""

    seconds: float = 10.0
    """Wall time of a test. More than the CPU time, so that a busy machine does not fail a right program."""
    cpu_seconds: int = 4
    """CPU time of each process."""
    memory_mb: int = 512
    """Address space of each process, in MiB. In a container or cgroup: memory of all processes together."""
    processes: int = 4
    """Processes and threads at a time."""
    files_mb: int = 16
    """Size of /tmp, the only place that can be written to, and of each file there, in MiB."""
    output_bytes: int = MEBIBYTE
    """Size of standard output, of standard error, and of each result of a call."""

    def __post_init__(self) -> None:
        """Raises ValueError if a limit is not above 0."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{field.name}: found {value!r}, expected a number above 0")
            if field.name != "seconds" and not isinstance(value, int):
                raise ValueError(f"{field.name}: found {value!r}, expected a whole number")
