"""Liveness probes of responding and silent processes, and while the launcher itself is suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from quartet.launcher.supervisor import LivenessProbe
from quartet.system.child_processes import process_state
from tests.waiting import LIMIT, wait_until


def test_the_silent_time_grows_until_a_response() -> None:
    living = threading.Event()
    probe = LivenessProbe("critic", lambda _: living.is_set(), hang_timeout=0.4)
    started = time.monotonic()
    wait_until(lambda: probe.silent_seconds > 0.4)
    assert time.monotonic() - started > 0.3, "the count must not exceed the elapsed time"
    living.set()
    wait_until(lambda: probe.silent_seconds == 0.0)
    probe.stop()


def test_a_probe_counts_for_at_most_its_timeout() -> None:
    probing = threading.Event()
    resume = threading.Event()

    def responds(timeout: float) -> bool:
        assert timeout == 0.1
        probing.set()
        return resume.wait(1.0) and False

    probe = LivenessProbe("critic", responds, hang_timeout=0.4)
    assert probing.wait(LIMIT)
    time.sleep(0.5)  # As if the launcher were suspended during the probe.
    probe.stop()
    resume.set()
    wait_until(lambda: probe.silent_seconds > 0)
    assert probe.silent_seconds <= 0.4 / 8 + 0.4 / 4


def test_a_reset_probes_immediately_and_restarts_the_count() -> None:
    probes: list[float] = []

    def responds(_: float) -> bool:
        probes.append(time.monotonic())
        return True

    probe = LivenessProbe("critic", responds, hang_timeout=1e6)
    probe.silent_seconds = 7.0
    assert not probes
    probe.reset()
    wait_until(lambda: len(probes) == 1)
    assert probe.silent_seconds == 0.0
    probe.stop()


def test_the_state_of_a_stopped_process_is_reported() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            wait_until(lambda: process_state(process.pid) == "")  # While the process starts, it may wait for a device.
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: process_state(process.pid) == " (its process is stopped)")
        finally:
            process.kill()
    assert process_state(process.pid) == ""
