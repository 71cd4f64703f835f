"""Supervise one process: restart it when it ends or hangs, and give up if restarts do not help."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from quartet.config.deployment import RecoveryConfig
from quartet.errors import ConfigError, ServiceFailed
from quartet.launcher.service_process import ServiceProcess, describe_exit, log_tail
from quartet.system.child_processes import STOPPED, process_state
from quartet.system.fork_server import ForkedProcess


class SupervisedProcess(Protocol):
    """A process that can be restarted at its address: a service, the gateway, or Redis."""

    name: str
    log: Path
    ready: bool

    @property
    def process(self) -> ForkedProcess | subprocess.Popen[bytes]:
        """The process that was started last."""

    def start(self) -> None:
        """Start the process at the address that it had. Does not wait for it."""

    def repair(self) -> str:
        """Remove the cause of the process's end if that is possible, and describe it. Return "" otherwise."""

    def responds(self, timeout: float) -> bool:
        """Return whether the process responds within ``timeout`` seconds."""


class RestartCounter:
    """Counter of the consecutive restarts of a process; determines the pause before the next one."""

    def __init__(self, recovery: RecoveryConfig) -> None:
        self._recovery = recovery
        self.consecutive = 0
        self.since = 0.0
        """Monotonic time of the first exit in this series."""

    def next_pause(self, now: float, uptime: float) -> float | None:
        """Count a restart and return the seconds to wait before it, or None if no restart is left.

        ``uptime`` is the time that the process ran, in seconds. A long uptime resets the count.
        """
        if self.consecutive == 0 or uptime >= self._recovery.restart_reset_seconds:
            self.consecutive, self.since = 0, now
        if self.consecutive == self._recovery.max_restarts:
            return None
        self.consecutive += 1
        return self._recovery.pause(self.consecutive)

    @property
    def count(self) -> str:
        """The number of the newest restart, such as "2 of 5 in a row"."""
        return f"{self.consecutive} of {self._recovery.max_restarts} in a row"

    def gave_up(self, now: float) -> str:
        """Return the number of restarts, their limit and the time before the process was given up; "" if none was allowed."""
        tried = "1 restart" if self.consecutive == 1 else f"{self.consecutive} restarts"
        limit = f"(recovery.max_restarts {self._recovery.max_restarts})"
        return f"given up after {tried} in {now - self.since:.0f} s {limit}" if self.consecutive else ""


class ProcessSupervisor:
    """Supervisor that keeps one process running. ``poll`` takes the actions that are due and never waits."""

    def __init__(self, process: SupervisedProcess, recovery: RecoveryConfig, load_timeout: float, log: Any) -> None:
        """``process`` is ready. ``load_timeout`` is the time that a restart may take, in seconds; events go to ``log``."""
        self.supervised = process
        self._recovery, self._load_timeout, self._log = recovery, load_timeout, log
        self._restarts = RestartCounter(recovery)
        self._probe = LivenessProbe(process.name, process.responds, recovery.hang_timeout_seconds)
        self._stop_clock = StopClock()
        self._started = self._up_since = time.monotonic()
        self._up = True
        self._down_since: float | None = None
        self._restart_at: float | None = None
        self._killed = False

    def poll(self) -> list[str]:
        """Restart the process if it has ended, kill it if it hangs. Return messages for the user.

        Raises ServiceFailed if no restart is left. If none was allowed, raises ConfigError if the process reported one.
        """
        now = time.monotonic()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._start(now)
            return []
        if self.supervised.process.poll() is not None:
            return self._schedule_restart(now)
        if isinstance(self.supervised, ServiceProcess):
            self.supervised.read_messages()
        if self._killed:
            return []
        if not self._up:
            if self.supervised.ready:
                return self._report_recovery(now)
            if now - self._started > self._load_timeout:
                return self._kill(f"is not ready within timeouts.load_seconds {self._load_timeout:g} s")
            if self._stop_clock.seconds(self.supervised.process.pid) > self._recovery.hang_timeout_seconds:
                return self._kill(f"has not run for {self._recovery.hang_timeout_seconds:g} s")
            return []
        if self._probe.silent_seconds > self._recovery.hang_timeout_seconds:
            return self._kill(f"has not responded for {self._recovery.hang_timeout_seconds:g} s")
        return []

    def raise_if_down(self) -> None:
        """Raise ServiceFailed if the process has ended."""
        if self.supervised.process.poll() is not None:
            raise self._failure("")

    def stop(self) -> None:
        """Stop supervising. The process keeps running."""
        self._probe.stop()

    def _start(self, now: float) -> None:
        self._restart_at, self._started, self._up, self._killed = None, now, False, False
        self.supervised.start()
        self._probe.reset()

    def _report_recovery(self, now: float) -> list[str]:
        self._up, self._up_since = True, now
        self._probe.reset()
        seconds = now - (self._down_since or now)
        self._down_since = None
        self._log.info("process recovered", process=self.supervised.name, seconds=round(seconds, 3))
        return [f"{self.supervised.name}: back after {seconds:.1f} s"]

    def _kill(self, reason: str) -> list[str]:
        text = f"watchdog: {self.supervised.name} {reason}{process_state(self.supervised.process.pid)}; killed"
        self._log.warning("process killed", process=self.supervised.name, reason=text)
        self._down_since = self._down_since or time.monotonic()
        self._killed = True
        self.supervised.process.kill()
        return [text]

    def _schedule_restart(self, now: float) -> list[str]:
        process = self.supervised
        if isinstance(process, ServiceProcess):
            process.read_messages()
        self._down_since = self._down_since or now
        if self._recovery.max_restarts and (repaired := process.repair()):
            self._log.warning("process repaired", process=process.name, repair=repaired)
            self._start(now)
            return [repaired]
        pause = self._restarts.next_pause(now, uptime=now - self._up_since if self._up else 0.0)
        if pause is None:
            raise self._failure(self._restarts.gave_up(now))
        self._restart_at = now + pause
        self._up = False
        exit_text = self._describe_exit()
        self._log.warning(
            "process restarted",
            process=process.name,
            exit=exit_text,
            restart=self._restarts.consecutive,
            pause_seconds=pause,
        )
        return [f"{process.name}: {exit_text}; restarted ({self._restarts.count})"]

    def _describe_exit(self) -> str:
        reported = self.supervised.reported_error if isinstance(self.supervised, ServiceProcess) else None
        return describe_exit(self.supervised.process) + (f" ({reported['error']})" if reported else "")

    def _failure(self, prefix: str) -> ConfigError | ServiceFailed:
        self._log.error(
            "process given up",
            process=self.supervised.name,
            exit=self._describe_exit(),
            restarts=self._restarts.consecutive,
        )
        return exit_error(self.supervised, prefix)


def exit_error(process: SupervisedProcess, prefix: str = "") -> ConfigError | ServiceFailed:
    """Return the error that the end of a process means: the one that it reported, or the last lines of its log.

    Return ConfigError if the process reported one at its first start, else ServiceFailed. ``prefix`` comes before the cause.
    """
    reported = process.reported_error if isinstance(process, ServiceProcess) else None
    kind: type[ConfigError | ServiceFailed] = ServiceFailed
    if reported is not None:
        kind = ConfigError if reported["exit_code"] == 2 and not prefix else ServiceFailed
        text = ": ".join(text for text in (process.name, prefix, reported["error"]) if text)
    else:
        cause = "; ".join(text for text in (prefix, describe_exit(process.process)) if text)
        text = f"{process.name}: {cause}; {log_tail(process.log)}"
    error = kind(text)
    error.service = process.name
    return error


def first_line(error: Exception) -> str:
    """Return the message of an ``exit_error`` without the lines of the log."""
    return str(error).partition("; the last lines of ")[0].partition("\n")[0]


class StopClock:
    """Clock that runs while a signal stops a process. A process that loads does not respond yet, but its state is known."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, pid: int) -> float:
        """Return for how long the process has been stopped, since the first call that saw it. 0 if it runs."""
        now = time.monotonic()
        self._since = (self._since or now) if process_state(pid) == STOPPED else None
        return 0.0 if self._since is None else now - self._since


MAX_INTERVAL = 5.0
"""Maximum seconds between two probes."""
RETRY_INTERVAL = 0.2
"""Seconds from a failed probe to the next one."""


class LivenessProbe:
    """Repeated probe of a process by a separate thread, so that reading the result never waits."""

    def __init__(self, name: str, responds: Callable[[float], bool], hang_timeout: float) -> None:
        """``responds`` takes a timeout in seconds. The probe's intervals derive from ``hang_timeout``, in seconds."""
        self._responds = responds
        self._interval, self._timeout = min(MAX_INTERVAL, hang_timeout / 8), min(MAX_INTERVAL, hang_timeout / 4)
        self._stopped, self._wake = False, threading.Event()
        self.silent_seconds = 0.0
        """Seconds without a response."""
        threading.Thread(target=self._probe_until_stopped, name=f"watchdog {name}", daemon=True).start()

    def reset(self) -> None:
        """Reset the count and probe immediately. Call this after a restart of the process."""
        self.silent_seconds = 0.0
        self._wake.set()

    def stop(self) -> None:
        """Stop probing. Can be called more than once."""
        self._stopped = True
        self._wake.set()

    def _probe_until_stopped(self) -> None:
        last, responded = time.monotonic(), True
        while not self._stopped:
            self._wake.wait(self._interval if responded else min(self._interval, RETRY_INTERVAL))
            self._wake.clear()
            responded = self._responds(self._timeout)
            now = time.monotonic()
            # A probe counts for at most its timeout. If it took longer, this process itself was suspended (Ctrl-Z), and the
            # silence says nothing about the other one.
            self.silent_seconds = (
                0.0 if responded else self.silent_seconds + min(now - last, self._interval + self._timeout)
            )
            last = now
