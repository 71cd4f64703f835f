"""Progress board and run control: every watcher receives every step, and commands reach the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from quartet.config.loading import parse_config
from quartet.contract.control import Alert, Progress, RunState
from quartet.errors import Cancelled, ServiceUnavailable
from quartet.rpc.clients import OrchestratorClient
from quartet.rpc.server import Server
from quartet.rpc.service_channel import ServiceChannel
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.control.live_settings import LiveSettings
from quartet.services.orchestrator.control.progress import HISTORY, ProgressBoard
from quartet.services.orchestrator.control.run_control import RunControl
from quartet.services.orchestrator.servicer import OrchestratorServicer
from tests.waiting import LIMIT


def servicer(board: ProgressBoard, control: RunControl) -> OrchestratorServicer:
    config = parse_config({"data": {"prompts": "p"}, "actor": {"model": "a"}, "reward": {"model": "r"}}, "test")
    return OrchestratorServicer(board, control, LiveSettings(config, RunFiles(config.run_directory), control))


def commit(board: ProgressBoard, *steps: int) -> None:
    for step in steps:
        board.commit(step, {"step": step, "reward_mean": float(step)})


def steps_of(updates: list[Progress | None]) -> list[int]:
    """Return the distinct steps whose metrics a watcher received."""
    steps = [int(progress.metrics["step"]) for progress in updates if progress is not None and progress.metrics]
    return list(dict.fromkeys(steps))


def test_a_late_watcher_receives_every_step_and_then_the_end() -> None:
    board = ProgressBoard("run", 5)
    commit(board, 1, 2, 3, 4, 5)
    board.update(state=RunState.FINISHED)
    updates = list(board.watch(0))
    assert steps_of(updates) == [1, 2, 3, 4, 5]
    assert [progress.metrics["reward_mean"] for progress in updates if progress] == [1, 2, 3, 4, 5, 5]


def test_only_the_last_update_has_a_final_state() -> None:
    board = ProgressBoard("run", 3)
    board.update(state=RunState.TRAINING)
    commit(board, 1, 2, 3)
    board.update(state=RunState.FINISHED)
    updates = [progress for progress in board.watch(0) if progress is not None]
    assert [progress.state.ended for progress in updates] == [False, False, False, True]


@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_a_watcher_may_start_after_a_step(after: int) -> None:
    board = ProgressBoard("run", 3)
    commit(board, 1, 2, 3)
    watcher = board.watch(after)
    first = [next(watcher) for _ in range(max(1, 4 - after))]
    assert steps_of(first) == list(range(after + 1, 4)) or steps_of(first) == [3]
    commit(board, 4)
    board.update(state=RunState.STOPPED)
    assert steps_of(list(watcher))[-1] == 4


def test_concurrent_watchers_receive_every_step() -> None:
    board = ProgressBoard("run", 200)
    ready = threading.Barrier(4)

    def watch() -> list[Progress | None]:
        ready.wait(LIMIT)
        return list(board.watch(0))

    with ThreadPoolExecutor(3) as executor:
        watchers = [executor.submit(watch) for _ in range(3)]
        ready.wait(LIMIT)
        for step in range(1, 201):
            board.update(phase="generate")
            commit(board, step)
        board.update(state=RunState.FINISHED)
        for watcher in watchers:
            assert steps_of(watcher.result(timeout=LIMIT)) == list(range(1, 201))


def test_a_watcher_without_changes_receives_none_periodically() -> None:
    watcher = ProgressBoard("run", 1).watch(0, poll=0.01)
    assert next(watcher) is not None
    assert [next(watcher) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
def test_a_watch_ends_with_the_run(state: RunState) -> None:
    board = ProgressBoard("run", 1)
    board.update(state=state, error="why", exit_code=2)
    (last,) = list(board.watch(0))
    assert last is not None
    assert (last.state, last.error, last.exit_code) == (state, "why", 2)


def test_current_returns_a_copy() -> None:
    board = ProgressBoard("run", 1)
    board.note("one")
    received = board.current()
    board.note("two")
    commit(board, 1)
    assert (received.notes, received.step) == (["one"], 0)
    assert board.current().notes == ["one", "two"]


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard("run", 3)


@pytest.fixture
def control(tmp_path: Path) -> RunControl:
    return RunControl(RunFiles(tmp_path))


@pytest.fixture
def client(board: ProgressBoard, control: RunControl) -> Iterator[OrchestratorClient]:
    server = Server([servicer(board, control)], "127.0.0.1:0")
    client = OrchestratorClient(server.address, 5)
    yield client
    board.update(state=RunState.STOPPED)
    client.close()
    server.stop(5)


def test_every_field_of_the_progress_is_transmitted(client: OrchestratorClient, board: ProgressBoard) -> None:
    commit(board, 2)
    board.update(
        state=RunState.PAUSED, phase="update", num_scored=5, num_expected=8, error="e", exit_code=2, notes=["n"]
    )
    board.alert(Alert(2, "mismatch", "pause", "seen", "do"))
    board.update(recoveries=3, notes_before=4, alerts_before=5)
    progress = client.progress()
    assert progress == board.current()
    assert all(getattr(progress, field.name) for field in fields(progress)), "a field has its default"


def test_a_remote_watcher_receives_every_step_until_the_end(client: OrchestratorClient, board: ProgressBoard) -> None:
    commit(board, 1)
    updates = client.watch(0)
    assert next(updates).step == 1
    commit(board, 2, 3)
    board.update(state=RunState.FINISHED)
    rest = list(updates)
    assert {2, 3} <= {progress.step for progress in rest}
    assert rest[-1].state is RunState.FINISHED


def test_a_stop_reaches_the_training_thread(client: OrchestratorClient, control: RunControl) -> None:
    assert not control.stopping
    client.command("Stop")
    assert control.stopping


def test_a_pause_and_a_resume_reach_the_training_thread(client: OrchestratorClient, control: RunControl) -> None:
    client.command("Pause")
    assert control.paused
    client.command("Resume")
    assert not control.paused


def test_a_closed_client_raises_cancelled(client: OrchestratorClient) -> None:
    client.close()
    with pytest.raises(Cancelled, match="GetProgress: the channel is closed"):
        client.progress()
    with pytest.raises(Cancelled, match="WatchProgress: the channel is closed"):
        next(client.watch(0))


@pytest.mark.parametrize("end", ["resume", "stop"])
def test_a_paused_run_waits_until_it_is_resumed_or_stopped(control: RunControl, end: str) -> None:
    control.pause()
    waiting = threading.Thread(target=control.wait_while_paused)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    getattr(control, end)()
    waiting.join(LIMIT)
    assert not waiting.is_alive()
    assert not control.paused


def test_a_stopping_run_does_not_wait(control: RunControl) -> None:
    control.stop()
    control.pause()
    assert not control.paused
    control.wait_while_paused()


def test_the_orchestrators_status_follows_the_board(client: OrchestratorClient, board: ProgressBoard) -> None:
    commit(board, 2)
    channel = ServiceChannel("orchestrator", client.address)
    (status,) = channel.wait_until_ready(5).roles
    channel.close()
    assert (status.run, status.step) == ("run", 2)


def test_a_stopped_orchestrator_is_unavailable(board: ProgressBoard, control: RunControl) -> None:
    server = Server([servicer(board, control)], "127.0.0.1:0")
    client = OrchestratorClient(server.address, 5)
    server.stop(0)
    with pytest.raises(ServiceUnavailable, match="orchestrator at"):
        client.command("Stop")
    client.close()


def test_commands_survive_a_restart_of_the_orchestrator(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    RunControl(files).pause()
    restarted = RunControl(files)
    assert restarted.paused
    restarted.resume()
    assert not RunControl(files).paused
    restarted.pause()
    restarted.stop()
    second_restart = RunControl(files)
    assert second_restart.stopping
    assert not second_restart.paused
    second_restart.resume()
    assert RunControl(files).stopping


def test_a_late_watcher_receives_a_limited_history() -> None:
    board = ProgressBoard("run", 10 * HISTORY)
    commit(board, *range(1, 2 * HISTORY + 1))
    watcher = board.watch(after_step=0)
    received = [next(watcher) for _ in range(HISTORY)]
    assert [progress.step for progress in received if progress] == list(range(HISTORY + 1, 2 * HISTORY + 1))
    next(watcher)
    commit(board, 2 * HISTORY + 1)
    assert [current.step for current in (next(watcher), next(watcher)) if current] == [2 * HISTORY + 1] * 2
    assert len(board._history) == HISTORY


def test_the_last_notes_and_alerts_are_kept_and_the_dropped_ones_counted() -> None:
    board = ProgressBoard("run", 3)
    for number in range(HISTORY):
        board.note(str(number))
        board.alert(Alert(number, "kl", "warn", "", ""))
    assert (board.current().notes_before, board.current().alerts_before) == (0, 0)
    for number in range(HISTORY, HISTORY + 3):
        board.alert(Alert(number, "kl", "warn", "", ""))
        board.note(str(number))
    board.recovering("lost")
    current = board.current()
    assert current.notes == [*map(str, range(4, HISTORY + 3)), "recovering: lost"]
    assert current.notes_before == 4
    assert [alert.step for alert in current.alerts] == list(range(3, HISTORY + 3))
    assert current.alerts_before == 3
    assert (current.state, current.recoveries) == (RunState.RECOVERING, 1)
