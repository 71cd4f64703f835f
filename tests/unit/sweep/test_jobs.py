"""Processes in turn and several at once, with stand-ins for processes."""

from __future__ import annotations

import pytest

from quartet.launcher.sweep import jobs
from quartet.launcher.sweep.jobs import run_jobs


class FakeJob:
    """A process that ends at a given check."""

    def __init__(self, checks: int, code: int = 0) -> None:
        self.checks, self.code = checks, code
        self.calls: list[str] = []

    def poll(self) -> int | None:
        self.checks -= 1
        return None if self.checks > 0 else self.code

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self) -> int:
        self.calls.append("wait")
        return self.code


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)


def test_one_slot_runs_the_items_in_turn_and_reports_their_exit_status() -> None:
    events: list[tuple[str, int]] = []

    def start(item: int, slot: int) -> FakeJob:
        events.append(("start", item))
        assert slot == 0
        return FakeJob(3, code=item)

    run_jobs([0, 1, 2], 1, start, lambda item, code: events.append((f"end {code}", item)))
    assert events == [("start", 0), ("end 0", 0), ("start", 1), ("end 1", 1), ("start", 2), ("end 2", 2)]


def test_a_slot_is_used_again_as_soon_as_it_is_free_and_never_twice_at_once() -> None:
    busy: set[int] = set()
    slots: dict[str, int] = {}
    most = 0

    def start(item: str, slot: int) -> FakeJob:
        nonlocal most
        assert slot not in busy
        busy.add(slot)
        slots[item] = slot
        most = max(most, len(busy))
        return FakeJob(9 if item == "long" else 2)

    run_jobs(["long", "a", "b", "c"], 2, start, lambda item, _: busy.remove(slots[item]))
    assert most == 2
    assert slots == {"long": 0, "a": 1, "b": 1, "c": 1}
    assert busy == set()


def test_an_interrupt_stops_and_awaits_the_active_processes_and_starts_no_other() -> None:
    started: list[FakeJob] = []

    def start(item: int, slot: int) -> FakeJob:
        started.append(FakeJob(1000))
        return started[-1]

    def interrupt(active: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([0, 1, 2], 2, start, lambda *_: None, interrupt)
    assert [job.calls for job in started] == [["terminate", "wait"]] * 2


def test_a_second_interrupt_kills_them() -> None:
    class Stubborn(FakeJob):
        def wait(self) -> int:
            if "kill" not in self.calls:
                raise KeyboardInterrupt
            return super().wait()

    job = Stubborn(1000)

    def interrupt(active: list[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs([0], 1, lambda *_: job, lambda *_: None, interrupt)
    assert job.calls == ["terminate", "kill", "wait"]


def test_an_error_at_the_start_of_a_process_stops_the_others() -> None:
    job = FakeJob(1000)

    def start(item: int, slot: int) -> FakeJob:
        if item:
            raise OSError("no space")
        return job

    with pytest.raises(OSError, match="no space"):
        run_jobs([0, 1], 2, start, lambda *_: None)
    assert job.calls == ["terminate", "wait"]
