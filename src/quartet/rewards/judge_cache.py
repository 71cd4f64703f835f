"""Scores that a judge has given, by the content of the request: in a file of the run's directory, or in memory."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import structlog

log = structlog.get_logger()


class JudgeCache:
    """At most ``entries`` scores. The oldest make way for new ones. To be used on one thread.

    A file that is missing, damaged, locked or full costs requests. It changes no score and raises nothing.
    """

    def __init__(self, path: Path | None, entries: int, min_score: float, max_score: float) -> None:
        """``path`` is the file; None, or a folder that does not exist, keeps the scores in memory.

        A stored value that is not a number from ``min_score`` to ``max_score`` is removed and not returned.
        """
        self._path, self._entries, self._min_score, self._max_score = path, entries, min_score, max_score
        try:
            if path is None or not path.parent.is_dir():
                self._database = self._open_in_memory("the run's directory does not exist here")
            else:
                self._database = _open(path)
        except (sqlite3.Error, OSError) as error:
            self._database = self._open_in_memory(str(error))

    def get(self, key: str) -> float | None:
        """Return the score of a request, or None."""
        try:
            row = self._database.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            [score] = row
            if isinstance(score, float) and self._min_score <= score <= self._max_score:
                return score
            self._database.execute("DELETE FROM scores WHERE key = ?", (key,))
        except sqlite3.Error as error:
            self._fall_back(error)
        return None

    def put(self, key: str, score: float) -> None:
        """Keep the score of a request. It is on the disk when this returns, if the cache is a file."""
        try:
            self._put(key, score)
        except sqlite3.Error as error:
            self._fall_back(error)
            self._put(key, score)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()

    def _put(self, key: str, score: float) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute("INSERT OR IGNORE INTO scores (key, score) VALUES (?, ?)", (key, score))
        self._database.execute(
            "DELETE FROM scores WHERE number <= (SELECT MAX(number) FROM scores) - ?", (self._entries,)
        )
        self._database.execute("COMMIT")

    def _fall_back(self, error: sqlite3.Error) -> None:
        """Use memory from now on: each further call could wait for the lock again."""
        self.close()
        self._database = self._open_in_memory(str(error))

    def _open_in_memory(self, reason: str) -> sqlite3.Connection:
        log.warning(
            "judge cache is only in memory; after a restart, responses are judged again",
            path=str(self._path),
            reason=reason,
        )
        return _open(":memory:")


def _open(path: Path | str) -> sqlite3.Connection:
    """Open a database and create its table. Raises sqlite3.Error."""
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA busy_timeout = 10000")
        database.execute(
            "CREATE TABLE IF NOT EXISTS scores (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, score REAL)"
        )
    except sqlite3.Error:
        database.close()
        raise
    return database
