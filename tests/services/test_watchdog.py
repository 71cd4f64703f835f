"""Detection of a rank that hangs, from the reports of all ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from quartet.models.workers.progress import Progress, RankReport
from quartet.services.ranks import watch
from quartet.services.ranks.watch import Failure, HangDetector, Silence, Watchdog
from tests.waiting import LIMIT, wait_until

TIMEOUT = 10.0
IDLE = RankReport(99999999, "elsewhere")
UPDATE = replace(IDLE, command="update", commands=3)
Reports = Sequence[tuple[int, RankReport]]


def failure_after(seconds: float, reports: Sequence[RankReport], stopped: Sequence[int] = ()) -> str:
    """Return the failure after the reports have stayed the same for ``seconds``. Ranks in ``stopped`` do not report."""
    detector = HangDetector(len(reports), TIMEOUT)
    failure = ""
    for second in range(int(seconds) + 1):
        beats = [0 if rank in stopped else second for rank in range(len(reports))]
        failure = detector.poll(list(zip(beats, reports, strict=True)), 1000.0 + second)
    return failure


def test_ranks_that_wait_for_a_command_do_not_hang() -> None:
    assert failure_after(1000, [IDLE, replace(IDLE, collective="broadcast")]) == ""


def test_the_rank_that_computes_while_the_others_wait_hangs_after_the_limit() -> None:
    reports = [
        replace(UPDATE, marks=8, collective="all_gather"),
        replace(UPDATE, marks=8, collective="all_reduce"),
        replace(UPDATE, marks=7, place="micro-batch 3"),
    ]
    assert failure_after(TIMEOUT, reports) == ""
    assert failure_after(TIMEOUT + 1, reports) == (
        "rank 2 of 3 (process 99999999 on elsewhere): no progress for 10 s in update, micro-batch 3, while the others wait in "
        "all_gather and all_reduce"
    )


def test_the_error_of_a_rank_that_has_stopped_is_named() -> None:
    reports = [IDLE, replace(IDLE, error="RuntimeError: invalid device ordinal")]
    assert failure_after(TIMEOUT + 1, reports, stopped=[1]) == (
        "rank 1 of 2 (process 99999999 on elsewhere): no progress for 10 s in no command: RuntimeError: invalid device ordinal"
    )


def test_a_rank_that_reads_while_the_others_wait_does_not_hang() -> None:
    reading = replace(UPDATE, marks=7, reading=True)
    assert failure_after(1000, [replace(UPDATE, marks=8, collective="all_reduce"), reading]) == ""


def test_ranks_that_all_compute_at_the_same_place_do_not_hang() -> None:
    assert failure_after(1000, [replace(UPDATE, marks=7), replace(UPDATE, marks=7)]) == ""


def test_a_rank_that_makes_progress_while_the_others_wait_does_not_hang() -> None:
    detector = HangDetector(2, TIMEOUT)
    waiting = replace(UPDATE, marks=8, collective="all_gather")
    for second in range(100):
        reports: Reports = [(second, waiting), (second, replace(UPDATE, marks=second // 9))]
        assert detector.poll(reports, 1000.0 + second) == ""


def test_a_rank_that_computes_does_not_hang_when_the_others_have_only_begun_to_wait() -> None:
    detector = HangDetector(2, TIMEOUT)
    for second in range(15):
        first = replace(UPDATE, marks=7 if second < 12 else 8, collective="" if second < 12 else "all_gather")
        assert detector.poll([(second, first), (second, replace(UPDATE, marks=7))], 1000.0 + second) == ""


def test_the_rank_that_is_behind_hangs_if_all_wait() -> None:
    waiting = replace(UPDATE, marks=8, collective="all_gather")
    assert failure_after(11, [waiting, replace(waiting, marks=7)]).startswith("rank 1 of 2")
    both = failure_after(11, [waiting, waiting])
    assert both.startswith("rank 0 of 2")
    assert "; rank 1 of 2" in both


def test_a_rank_without_reports_hangs_also_between_commands() -> None:
    this = replace(IDLE, host=socket.gethostname(), process=os.getpid())
    assert failure_after(11, [IDLE, this], stopped=[1]) == (
        f"rank 1 of 2 (process {os.getpid()}): no progress for 10 s in no command"
    )


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (("", ""), "rank 1 of 4 (process 99999999 on elsewhere): no sign of life"),
        (("", "connection closed"), "rank 1 of 4 (process 99999999 on elsewhere): no sign of life"),
        (("KeyError: 5", ""), "rank 2 of 4 (process 99999999 on elsewhere): no sign of life"),
    ],
)
def test_lost_ranks_are_those_without_reports_and_first_those_without_an_error(
    errors: tuple[str, str], expected: str
) -> None:
    detector = HangDetector(4, TIMEOUT)
    stopped = [replace(IDLE, error=error) for error in errors]
    for second in range(5):
        detector.poll([(second, IDLE), *((0, report) for report in stopped), (second, IDLE)], 1000.0 + second)
    assert detector.lost().text.partition("; ")[0] == expected


def test_a_rank_that_ended_with_an_error_is_lost_with_that_error() -> None:
    detector = HangDetector(2, TIMEOUT)
    for second in range(5):
        detector.poll([(second, IDLE), (0, replace(IDLE, error="KeyError: 5"))], 1000.0 + second)
    assert detector.lost() == Failure("rank 1 of 2 (process 99999999 on elsewhere): KeyError: 5")


def test_an_error_of_a_known_class_counts_before_ranks_that_ended_with_it() -> None:
    # torchrun ends the other ranks of a machine when one of them ends.
    detector = HangDetector(4, TIMEOUT)
    exhausted = replace(IDLE, error="lower micro_batch_tokens", error_kind="OutOfMemory")
    for second in range(5):
        detector.poll([(second, IDLE), (0, IDLE), (0, exhausted), (second, IDLE)], 1000.0 + second)
    expected = Failure("rank 2 of 4 (process 99999999 on elsewhere): lower micro_batch_tokens", "OutOfMemory")
    assert detector.lost() == expected
    assert detector.error(2) == Failure("lower micro_batch_tokens", "OutOfMemory")


def test_a_suspended_observer_blames_nobody_for_its_pause() -> None:
    silence = Silence()
    silence.poll(1, 1000.0)
    assert silence.poll(1, 5000.0) == Silence.MAX_PAUSE


def test_progress_reports_the_micro_batch_and_the_layer() -> None:
    progress = Progress()
    progress.begin("update")
    progress.begin_pass()
    progress.begin_pass()
    progress.mark("forward pass of layer 4")
    report = progress.report()
    assert (report.command, report.commands, report.marks, report.collective) == ("update", 1, 3, "")
    assert report.place == "micro-batch 2, forward pass of layer 4"
    progress.end()
    assert progress.report().command == ""


def test_a_rank_publishes_its_error_until_rank_0_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "BEAT_SECONDS", 0.01)
    board = Board()
    exchanges: list[int] = []

    def exchange(report: RankReport, ranks: Sequence[int]) -> list[tuple[int, RankReport]]:
        exchanges.append(0)
        # Rank 0 exchanges reports from the 20th exchange of this rank.
        return [(max(1, len(exchanges) - 20), IDLE)]

    monkeypatch.setattr(board, "exchange", exchange)
    rank = Watchdog(board, 1, 2, lambda: IDLE, 60)
    sleep, waiting = time.sleep, threading.get_ident()

    def sleep_elsewhere(seconds: float) -> None:
        assert threading.get_ident() != waiting, "the rank polls"
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep_elsewhere)
    rank.publish()
    rank.stop()
    assert len(exchanges) > 20


def test_progress_reports_that_a_rank_reads() -> None:
    progress = Progress()
    with progress.reading():
        with progress.reading():
            pass
        assert progress.report().reading
    assert not progress.report().reading


class Board:
    """Reports in memory, instead of in torch's store."""

    def __init__(self) -> None:
        self.reports: dict[int, tuple[int, RankReport]] = {0: (1, IDLE), 1: (1, IDLE)}

    def exchange(self, report: RankReport, ranks: Sequence[int]) -> list[tuple[int, RankReport]]:
        return [self.reports[rank] for rank in ranks]


def test_rank_0_reports_a_silent_rank_and_others_end_without_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() if code == 1 else None)
    first = Watchdog(Board(), 0, 2, lambda: IDLE, 0.5)
    second = Watchdog(Board(), 1, 2, lambda: IDLE, 0.5)
    try:
        assert ended.wait(LIMIT)
        wait_until(first.failure)
    finally:
        first.stop()
        second.stop()
