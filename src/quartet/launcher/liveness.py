"""The watchdog's ear: how long a process has not answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

MAX_INTERVAL = 5.0
"""Seconds between two questions, at most."""
AGAIN = 0.2
"""Seconds from a question that was not answered to the next one."""


class LivenessProbe:
    """Asks a process again and again whether it lives, from a thread of its own: whoever looks never waits."""

    def __init__(self, name: str, answers: Callable[[float], bool], stall: float) -> None:
        """``answers`` takes a deadline in seconds; ``stall`` is the silence that matters, in seconds."""
        self._answers = answers
        self._interval, self._deadline = min(MAX_INTERVAL, stall / 8), min(MAX_INTERVAL, stall / 4)
        self._ended, self._hurry = False, threading.Event()
        self.silent = 0.0
        """Seconds without an answer."""
        threading.Thread(target=self._ask, name=f"watchdog {name}", daemon=True).start()

    def reset(self) -> None:
        """Counts anew, and asks at once: for a process that was started again."""
        self.silent = 0.0
        self._hurry.set()

    def stop(self) -> None:
        """Asks no more. May be called again."""
        self._ended = True
        self._hurry.set()

    def _ask(self) -> None:
        last, answered = time.monotonic(), True
        while not self._ended:
            self._hurry.wait(self._interval if answered else min(self._interval, AGAIN))
            self._hurry.clear()
            answered = self._answers(self._deadline)
            now = time.monotonic()
            # A question counts for no longer than it may take: where it took longer, this process was stopped itself (Ctrl-Z),
            # and nobody can say what the others did.
            self.silent = 0.0 if answered else self.silent + min(now - last, self._interval + self._deadline)
            last = now


def process_state(pid: int) -> str:
    """What keeps a process from answering, as far as the system says it: " (its process is stopped)", or nothing."""
    try:
        # The command stands in parentheses and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    words = {"T": "is stopped", "t": "is held by a debugger", "D": "waits for a device"}
    return f" (its process {words[state]})" if state in words else ""
