"""One process under supervision: restarted where it ends or stalls, given up where that does not help."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from quartet.config import RecoveryConfig
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.liveness import LivenessProbe, process_state
from quartet.launcher.service_process import ServiceProcess, describe_exit, log_tail


class SupervisedProcess(Protocol):
    """A process that can be started again in its place: a service, or Redis."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    ready: bool

    def begin(self) -> None:
        """Starts the process, at the address that it had; does not wait for it."""

    def repair(self) -> str:
        """Removes what made the process end, where that can be done, and says so. Otherwise empty."""

    def answers(self, timeout: float) -> bool:
        """Whether it answers within ``timeout`` seconds."""


class RestartCounter:
    """How often in a row a process was restarted, and how long to wait before the next time."""

    def __init__(self, recovery: RecoveryConfig) -> None:
        self._recovery = recovery
        self.in_a_row = 0
        self.since = 0.0
        """Monotonic time of the first end of the row."""

    def next(self, now: float, lasted: float) -> float | None:
        """Seconds until the process may be started again; None: it is given up. ``lasted``: seconds for which it ran."""
        if self.in_a_row == 0 or lasted >= self._recovery.restart_reset_seconds:
            self.in_a_row, self.since = 0, now
        if self.in_a_row == self._recovery.max_restarts:
            return None
        self.in_a_row += 1
        return self._recovery.pause(self.in_a_row)

    @property
    def count(self) -> str:
        """Which of those that are allowed the newest is."""
        return f"{self.in_a_row} of {self._recovery.max_restarts} in a row"

    def given_up(self, now: float) -> str:
        """After how many, and in which time; empty where none was allowed."""
        tried = "1 restart" if self.in_a_row == 1 else f"{self.in_a_row} restarts"
        return f"given up after {tried} in {now - self.since:.0f} s" if self.in_a_row else ""


class ProcessSupervisor:
    """Keeps one process running. ``look`` does what is due and never waits."""

    def __init__(self, part: SupervisedProcess, recovery: RecoveryConfig, load: float, log: Any) -> None:
        """``part`` is up. ``load`` is the time that it has for a start, in seconds; ``log`` takes what happens."""
        self.part = part
        self._recovery, self._load, self._log = recovery, load, log
        self._restarts = RestartCounter(recovery)
        self._pulse = LivenessProbe(part.name, part.answers, recovery.hang_timeout_seconds)
        self._begun = self._up_since = time.monotonic()
        self._up = True
        self._down_since: float | None = None
        self._due: float | None = None
        self._killed = False

    def look(self) -> list[str]:
        """Restart the process where it has ended, kills it where it has stalled. Gives what a user should know.

        Raises ServiceFailed when the restarts are used up; without any allowed, ConfigError where the process said so.
        """
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self._begin(now)
            return []
        if self.part.process.poll() is not None:
            return self._restart(now)
        if isinstance(self.part, ServiceProcess):
            self.part.read_messages()
        if self._killed:
            return []
        if not self._up:
            if self.part.ready:
                return self._welcome(now)
            if now - self._begun > self._load:
                return self._kill(f"is not ready within timeouts.load_seconds {self._load:g} s")
            return []
        if self._pulse.silent > self._recovery.hang_timeout_seconds:
            return self._kill(f"has not answered for {self._recovery.hang_timeout_seconds:g} s")
        return []

    def blame(self) -> None:
        """Raises ServiceFailed when the process is down."""
        if self.part.process.poll() is not None:
            raise self._failure("")

    def stop(self) -> None:
        """Watches no more; the process is left as it is."""
        self._pulse.stop()

    def _begin(self, now: float) -> None:
        self._due, self._begun, self._up, self._killed = None, now, False, False
        self.part.begin()
        self._pulse.reset()

    def _welcome(self, now: float) -> list[str]:
        self._up, self._up_since = True, now
        self._pulse.reset()
        seconds = now - (self._down_since or now)
        self._down_since = None
        self._log.info("back", process=self.part.name, seconds=round(seconds, 3))
        return [f"{self.part.name}: back after {seconds:.1f} s"]

    def _kill(self, why: str) -> list[str]:
        text = f"watchdog: {self.part.name} {why}{process_state(self.part.process.pid)}; killed"
        self._log.warning("stalled", process=self.part.name, why=text)
        self._down_since = self._down_since or time.monotonic()
        self._killed = True
        self.part.process.kill()
        return [text]

    def _restart(self, now: float) -> list[str]:
        part = self.part
        if isinstance(part, ServiceProcess):
            part.read_messages()
        self._down_since = self._down_since or now
        if self._recovery.max_restarts and (repaired := part.repair()):
            self._log.warning("mended", process=part.name, what=repaired)
            self._begin(now)
            return [repaired]
        lasted = now - self._up_since if self._up else 0.0
        wait = self._restarts.next(now, lasted)
        if wait is None:
            raise self._failure(self._restarts.given_up(now))
        self._due = now + wait
        self._up = False
        text = f"{part.name}: {self._how()}; restarted ({self._restarts.count})"
        self._log.warning(
            "restarted", process=part.name, ended=self._how(), number=self._restarts.in_a_row, after_seconds=wait
        )
        return [text]

    def _how(self) -> str:
        words = self.part.reported_error if isinstance(self.part, ServiceProcess) else None
        return describe_exit(self.part.process) + (f" ({words['error']})" if words else "")

    def _failure(self, before: str) -> ConfigError | ServiceFailed:
        part = self.part
        self._log.error("given up", process=part.name, ended=self._how(), restarts=self._restarts.in_a_row)
        return exit_error(part, before)


def exit_error(part: SupervisedProcess, before: str = "") -> ConfigError | ServiceFailed:
    """What the end of a process means: what it said, or the last lines of its log. ``before`` comes before that.

    ConfigError where the process said so at its first start, ServiceFailed otherwise.
    """
    words = part.reported_error if isinstance(part, ServiceProcess) else None
    if words is not None:
        kind = ConfigError if words["exit_code"] == 2 and not before else ServiceFailed
        return kind(": ".join(word for word in (part.name, before, words["error"]) if word))
    ended = "; ".join(word for word in (before, describe_exit(part.process)) if word)
    return ServiceFailed(f"{part.name}: {ended}; {log_tail(part.log)}")


def first_line(error: Exception) -> str:
    """What ``exit_error`` gives, without the lines of the log."""
    return str(error).partition("; the last lines of ")[0].partition("\n")[0]
