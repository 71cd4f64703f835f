"""The watchdog's ear, against answers that come, do not come, and come late because the launcher itself stood still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from quartet.launcher.liveness import LivenessProbe, process_state


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_silence_grows_until_there_is_an_answer() -> None:
    living = threading.Event()
    pulse = LivenessProbe("critic", lambda _: living.is_set(), stall=0.4)
    begun = time.monotonic()
    wait_for(lambda: pulse.silent > 0.4)
    assert time.monotonic() - begun > 0.3, "it ran ahead of the clock"
    living.set()
    wait_for(lambda: pulse.silent == 0.0)
    pulse.stop()


def test_a_question_counts_for_no_longer_than_it_may_take() -> None:
    asked = threading.Event()
    go_on = threading.Event()

    def answers(deadline: float) -> bool:
        assert deadline == 0.1
        asked.set()
        return go_on.wait(1.0) and False

    pulse = LivenessProbe("critic", answers, stall=0.4)
    assert asked.wait(10)
    time.sleep(0.5)  # As long as a stop of the whole launcher, in the middle of its question.
    pulse.stop()
    go_on.set()
    wait_for(lambda: pulse.silent > 0)
    assert pulse.silent <= 0.4 / 8 + 0.4 / 4


def test_a_process_that_was_started_again_is_asked_at_once_and_counted_anew() -> None:
    questions: list[float] = []

    def answers(_: float) -> bool:
        questions.append(time.monotonic())
        return True

    pulse = LivenessProbe("critic", answers, stall=1e6)
    pulse.silent = 7.0
    assert not questions
    pulse.reset()
    wait_for(lambda: len(questions) == 1, 2.0)
    assert pulse.silent == 0.0
    pulse.stop()


def test_a_stopped_process_is_called_that() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            wait_for(lambda: process_state(process.pid) == "")  # At its start it may wait for a device.
            os.kill(process.pid, signal.SIGSTOP)
            wait_for(lambda: process_state(process.pid) == " (its process is stopped)")
        finally:
            process.kill()
    assert process_state(process.pid) == ""
