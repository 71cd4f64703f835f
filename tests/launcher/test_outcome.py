"""How a run ends: the recorded outcome decides, and a process that has ended says more than the orchestrator."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from quartet.contract.control import Progress, RunState
from quartet.errors import ConfigError, FunctionFailed, OutOfMemory, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.launcher.local_run import _follow
from quartet.run_directory.run_files import RunFiles, RunOutcome


class Processes:
    """Launcher of processes of which one may have ended."""

    total_steps = 4

    def __init__(self, ended: QuartetError | None = None) -> None:
        self.ended, self.blamed, self.checks = ended, list[str](), 0

    def check(self) -> list[str]:
        self.checks += 1
        return []

    def raise_if_down(self, service: str) -> None:
        self.blamed.append(service)
        if self.ended is not None:
            raise self.ended


class Lines(list[str]):
    """Display that keeps messages."""

    def show(self, progress: Progress) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def print_line(self, line: str) -> None:
        self.append(line)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def follow(files: RunFiles, updates: list[Progress | None], processes: Any = None) -> tuple[RunState, list[str]]:
    received: queue.Queue[Progress | None] = queue.Queue()
    for update in updates:
        received.put(update)
    lines = Lines()
    return _follow(processes or Processes(), received, lines, files, threading.Event()), lines


def ended(state: RunState, **values: Any) -> Progress:
    return Progress("run", 4, state=state, step=2, **values)


@pytest.mark.parametrize("last", [ended(RunState.STOPPED), None])
def test_a_stopped_run_ends_with_its_record_whether_or_not_its_last_progress_arrives(
    files: RunFiles, last: Progress | None
) -> None:
    files.write_outcome(RunOutcome(RunState.STOPPED, 2))
    assert follow(files, [Progress("run", 4, step=1), last]) == (RunState.STOPPED, ["stopped after step 2 of 4"])


def test_a_broken_stream_without_a_record_is_no_end(files: RunFiles) -> None:
    processes = Processes()
    assert follow(files, [None, None, ended(RunState.FINISHED)], processes) == (RunState.FINISHED, [])
    assert processes.checks == 2


@pytest.mark.parametrize(("error", "kind"), [(ConfigError("why"), ConfigError), (ValueError("why"), ServiceFailed)])
def test_a_failure_is_raised_in_the_class_of_its_exit_status(
    files: RunFiles, error: Exception, kind: type[QuartetError]
) -> None:
    files.write_outcome(RunOutcome.of(error, 2))
    with pytest.raises(kind, match=r"^why$"):
        follow(files, [ended(RunState.FAILED, error="why")])


def test_a_full_disk_does_not_hide_the_error(files: RunFiles) -> None:
    with pytest.raises(ConfigError, match=r"^why$"):
        follow(files, [ended(RunState.FAILED, error="why", exit_code=2)])


def test_only_the_service_of_a_lost_call_is_waited_for(files: RunFiles) -> None:
    lost, refused = ServiceUnavailable("critic at here:1: lost"), FunctionFailed("reward.function: no")
    lost.service = refused.service = "critic at here:1"
    for error, service in ((lost, "critic at here:1"), (refused, "")):
        processes = Processes(ServiceFailed("critic: killed by SIGKILL"))
        files.write_outcome(RunOutcome.of(error, 2))
        with pytest.raises(ServiceFailed, match="killed"):
            follow(files, [None], processes)
        assert processes.blamed == [service]


def test_the_service_of_a_failure_is_that_of_its_cause() -> None:
    lost = ServiceUnavailable("lost")
    lost.service = "critic at here:1"
    try:
        try:
            raise lost
        except ServiceUnavailable:
            raise OutOfMemory("no room") from None
    except OutOfMemory as error:
        outcome = RunOutcome.of(error, 3)
    assert outcome == RunOutcome(RunState.FAILED, 3, "OutOfMemory", "no room", "critic at here:1")
    assert outcome.exit_status == 1


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"state": "absent", "step": 1}', '{"state": "failed"}'])
def test_a_damaged_record_is_none(files: RunFiles, content: str) -> None:
    files.outcome.write_text(content)
    assert files.read_outcome() is None
