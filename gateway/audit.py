"""Who commanded what: a line in the run's ``audit.jsonl`` for every command that gets as far as the run, accepted or refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from quartet.durable_files import append_durably, storing
from quartet.errors import QuartetError, StorageFailed
from quartet.gateway.http_errors import ProblemError
from quartet.gateway.readers.jsonl_records import shaped
from quartet.gateway.schemas import AuditEntry
from quartet.run_directory.run_files import RunFiles

log = structlog.get_logger()

MAX_OUTCOME = 500
"""Characters of a refusal that are kept."""


class Noted:
    """What became of a command's line."""

    problem = ""
    """Why it is not in the audit, or empty."""


@contextmanager
def audited(files: RunFiles, who: str, command: str, details: dict[str, Any]) -> Iterator[Noted]:
    """Around a command: notes that it was accepted or, where it raises, why it was refused."""
    noted = Noted()
    try:
        yield noted
    except (ProblemError, QuartetError) as error:
        note(files, who, command, details, str(error))
        raise
    except Exception:
        note(files, who, command, details, "the gateway failed; its log says why")
        raise
    noted.problem = note(files, who, command, details, "accepted")


def note(files: RunFiles, who: str, command: str, details: dict[str, Any], outcome: str) -> str:
    """Adds a line; a run that is not there has none, but the gateway's log has them all.

    Returns why the line could not be written, or nothing: a command that was carried out does not fail for its audit.
    """
    outcome = printable(" ".join(outcome.split()))[:MAX_OUTCOME]
    entry = AuditEntry(at=time.time(), who=who, command=command, details=details, outcome=outcome)
    log.info("command", run=files.root.name, who=who, command=command, outcome=outcome)
    if files.is_a_run():
        try:
            with storing(files.audit):
                append_durably(files.audit, entry.model_dump_json() + "\n")
        except StorageFailed as error:
            log.error("a command is not in its run's audit", run=files.root.name, command=command, error=str(error))
            return f"{files.audit.name} lacks it: {getattr(error.__cause__, 'strerror', None) or error}"
    return ""


def printable(text: str) -> str:
    """The text, half characters of JSON that no encoding knows written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def newest_first(
    path: Path, records: Sequence[dict[str, Any]], before: int | None, limit: int
) -> tuple[list[AuditEntry], int | None]:
    """At most ``limit`` lines before number ``before`` (from 0); and ``before`` of the next page, None after the last.

    Raises ConfigError naming the line that is none of the audit's.
    """
    last = len(records) if before is None else max(0, min(before, len(records)))
    first = max(0, last - limit)
    return shaped(AuditEntry, path, records[first:last], first + 1)[::-1], first or None
