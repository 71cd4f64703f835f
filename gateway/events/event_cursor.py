"""A position in the events of a run; its text is the id of a server-sent event."""

from __future__ import annotations

import re
from dataclasses import dataclass

FIRST_GENERATION = "0"
"""Generation of the position before the first line, which all histories of a run share."""
_CURSOR = re.compile(r"g([0-9a-f]{1,8})\.s(\d{1,15})\.a(\d{1,15})\.e(\d{1,15})\.c(\d{1,15})\.k(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class EventCursor:
    """Read position in a run: the number of lines read from each file, and the step of the newest checkpoint.

    ``generation`` is a checksum over the last line that was read of each file. After a rollback the run repeats its steps, and
    the checksum tells the repeated steps from the original ones.
    """

    generation: str = FIRST_GENERATION
    steps: int = 0
    alerts: int = 0
    evaluations: int = 0
    changes: int = 0
    checkpoint: int = 0

    def __str__(self) -> str:
        return f"g{self.generation}.s{self.steps}.a{self.alerts}.e{self.evaluations}.c{self.changes}.k{self.checkpoint}"

    @classmethod
    def parse(cls, text: str) -> EventCursor:
        """Return the cursor of an event's id. Raises ValueError if the id is malformed."""
        match = _CURSOR.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text[:100]!r}: expected the id of an event of this run's stream, such as {EventCursor('1f00ba', 7)}"
            )
        generation, *counts = match.groups()
        return cls(generation, *map(int, counts))
