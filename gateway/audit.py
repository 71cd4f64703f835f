"""Who commanded what: a line in the run's ``audit.jsonl`` for every command, accepted or refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from gateway.models import AuditEntry
from gateway.problems import ProblemError
from quartet.errors import QuartetError
from quartet.files import append_durably, storing
from quartet.telemetry.run_files import RunFiles

log = structlog.get_logger()

LONGEST_OUTCOME = 500
"""Characters of a refusal that are kept."""


@contextmanager
def audited(files: RunFiles, who: str, command: str, details: dict[str, Any]) -> Iterator[None]:
    """Around a command: notes that it was accepted or, where it raises, why it was refused."""
    try:
        yield
    except (ProblemError, QuartetError) as error:
        note(files, who, command, details, str(error))
        raise
    except Exception:
        note(files, who, command, details, "the gateway failed; its log says why")
        raise
    note(files, who, command, details, "accepted")


def note(files: RunFiles, who: str, command: str, details: dict[str, Any], outcome: str) -> None:
    """Adds a line; a run that is not there has none, but the gateway's log has them all. Raises StorageFailed."""
    outcome = printable(" ".join(outcome.split()))[:LONGEST_OUTCOME]
    entry = AuditEntry(at=time.time(), who=who, command=command, details=details, outcome=outcome)
    log.info("command", run=files.root.name, who=who, command=command, outcome=outcome)
    if files.is_a_run():
        with storing(files.audit):
            append_durably(files.audit, entry.model_dump_json() + "\n")


def printable(text: str) -> str:
    """The text, half characters of JSON that no encoding knows written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def newest_first(
    records: Sequence[dict[str, Any]], before: int | None, limit: int
) -> tuple[list[AuditEntry], int | None]:
    """At most ``limit`` lines before number ``before`` (from 0); and ``before`` of the next page, None after the last."""
    last = len(records) if before is None else max(0, min(before, len(records)))
    first = max(0, last - limit)
    return [AuditEntry.model_validate(record) for record in reversed(records[first:last])], first or None
