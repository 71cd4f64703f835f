"""The audit log of a run, ``audit.jsonl``: one line for every command that reaches the run, accepted or refused."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from quartet.errors import QuartetError, StorageFailed
from quartet.gateway.http.http_errors import ProblemError
from quartet.gateway.readers.jsonl_records import validated
from quartet.gateway.schemas import AuditEntry
from quartet.run_directory.run_files import RunFiles
from quartet.system.durable_files import append_durably, storage_errors

log = structlog.get_logger()

MAX_OUTCOME_LENGTH = 500
"""Characters of a refusal's text that are kept."""


@contextmanager
def audited(files: RunFiles, user: str, command: str, details: dict[str, Any]) -> Iterator[list[str]]:
    """Record the command that runs inside: accepted, or refused with the reason if it raises.

    Yields a list that gets the reason if an accepted command cannot be recorded.
    """
    problems: list[str] = []
    try:
        yield problems
    except (ProblemError, QuartetError) as error:
        write_entry(files, user, command, details, str(error))
        raise
    except Exception:
        write_entry(files, user, command, details, "internal error; see the gateway's log")
        raise
    problems.append(write_entry(files, user, command, details, "accepted"))


def write_entry(files: RunFiles, user: str, command: str, details: dict[str, Any], outcome: str) -> str:
    """Append an entry if the run exists, and log the command in any case.

    Return why the entry could not be written, or an empty string. A command that succeeded does not fail because of its audit
    entry.
    """
    outcome = printable(" ".join(outcome.split()))[:MAX_OUTCOME_LENGTH]
    entry = AuditEntry(at=time.time(), user=user, command=command, details=details, outcome=outcome)
    log.info("command received", run=files.root.name, user=user, command=command, outcome=outcome)
    if files.is_run():
        try:
            with storage_errors(files.audit):
                append_durably(files.audit, entry.model_dump_json() + "\n")
        except StorageFailed as error:
            log.error("audit entry not written", run=files.root.name, command=command, error=str(error))
            return f"not recorded in {files.audit.name}: {getattr(error.__cause__, 'strerror', None) or error}"
    return ""


def printable(text: str) -> str:
    """Return the text with lone surrogates, which JSON allows and UTF-8 does not, as escape sequences."""
    return text.encode("utf-8", "backslashreplace").decode()


def newest_first(
    path: Path, records: Sequence[dict[str, Any]], before: int | None, limit: int
) -> tuple[list[AuditEntry], int | None]:
    """Return at most ``limit`` entries before number ``before`` (from 0), and ``before`` of the next page or None.

    Raises ConfigError with the line number if a line is not an audit entry.
    """
    last = len(records) if before is None else max(0, min(before, len(records)))
    first = max(0, last - limit)
    return validated(AuditEntry, path, records[first:last], first + 1)[::-1], first or None
