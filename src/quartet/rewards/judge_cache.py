"""Scores that a judge has given, by the content of the request: in a file of the run's directory, or in memory."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import structlog

log = structlog.get_logger()


class JudgeCache:
    """At most ``entries`` scores. The oldest make way for new ones. To be used on one thread."""

    def __init__(self, path: Path | None, entries: int) -> None:
        """``path`` is the file; None, or a folder that does not exist, keeps the scores in memory."""
        self._entries = entries
        on_disk = path is not None and path.parent.is_dir()
        self._database = sqlite3.connect(path if path is not None and on_disk else ":memory:", isolation_level=None)
        try:
            self._create()
        except sqlite3.DatabaseError as error:
            # A cache is no record of the run: a damaged file costs requests and changes no score.
            log.warning("judge cache is unusable; scores are kept in memory", path=str(path), error=str(error))
            self._database.close()
            self._database = sqlite3.connect(":memory:", isolation_level=None)
            self._create()

    def get(self, key: str) -> float | None:
        """Return the score of a request, or None."""
        row = self._database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def put(self, key: str, score: float) -> None:
        """Keep the score of a request. It is on the disk when this returns."""
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("INSERT OR IGNORE INTO scores (key, score) VALUES (?, ?)", (key, score))
        self._database.execute(
            "DELETE FROM scores WHERE number <= (SELECT MAX(number) FROM scores) - ?", (self._entries,)
        )
        self._database.execute("COMMIT")

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _create(self) -> None:
        self._database.execute("PRAGMA busy_timeout = 10000")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS scores (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, score REAL)"
        )
