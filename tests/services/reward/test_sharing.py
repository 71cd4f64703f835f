"""Quotas and turns of runs that share a reward service, on a clock that the tests set."""

from __future__ import annotations

import pytest

from quartet.config.deployment import SharingConfig
from quartet.errors import InvalidRequest, QuotaExceeded
from quartet.services.reward.sharing import (
    CREDIT_SECONDS,
    CROWDED_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    OVER_QUOTA_SECONDS,
    UNNAMED,
    RunUsage,
    SharedCall,
    SharedTurns,
)


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Shared turns, and the calls of a simulated service that computes one unit of work at a time."""

    def __init__(self, **limits: object) -> None:
        self.clock = Clock()
        self.turns = SharedTurns(SharingConfig.model_validate(limits), self.clock)
        self.calls: list[SharedCall] = []
        self.units: dict[SharedCall, int] = {}
        self.order: list[str] = []

    def start(self, run: str, units: int, sequences: int = 1) -> SharedCall:
        call = self.turns.admit(run, sequences)
        self.calls.append(call)
        self.units[call] = units
        return call

    def refused(self, run: str, sequences: int = 1) -> QuotaExceeded:
        with pytest.raises(QuotaExceeded) as refused:
            self.turns.admit(run, sequences)
        return refused.value

    def compute(self, seconds: float = 1.0) -> SharedCall:
        """Compute the unit of work that has the turn."""
        [call] = [each for each in self.calls if each.turn.is_set()]
        self.clock.now += seconds
        self.order.append(call.run.name)
        self.units[call] -= 1
        self.turns.end_turn(call, seconds)
        if not self.units[call]:
            self.calls.remove(call)
            self.turns.leave(call)
        return call

    def usage(self, run: str) -> RunUsage:
        return next(each for each in self.turns.usage() if each.run == run)


def exceed(bench: Bench, run: str) -> None:
    """Fill the quota of calls of ``run`` with long calls, and exceed it."""
    while True:
        try:
            bench.start(run, units=10_000)
        except QuotaExceeded:
            return


def test_runs_within_their_quotas_take_turns_by_time() -> None:
    bench = Bench()
    bench.start("slow", units=10)
    bench.start("fast", units=40)
    for _ in range(40):
        bench.compute(seconds=4.0 if bench.calls[0].turn.is_set() else 1.0)
    seconds = {run: bench.usage(run).seconds for run in ("slow", "fast")}
    assert abs(seconds["slow"] - seconds["fast"]) <= 4.0, seconds


def test_the_calls_of_a_run_compute_one_after_the_other() -> None:
    bench = Bench()
    first, second = bench.start("a", units=2), bench.start("a", units=1)
    assert [bench.compute() for _ in range(3)] == [first, first, second]


@pytest.mark.parametrize("floods", [1, 3])
def test_runs_over_their_quota_get_their_share_together(floods: int) -> None:
    bench = Bench(max_pending_calls=2, over_quota_share=0.2)
    flooding = [f"flood-{index}" for index in range(floods)]
    for run in flooding:
        exceed(bench, run)
    for _ in range(50):
        call = bench.start("normal", units=8)
        while call in bench.calls:
            bench.compute(seconds=0.01)
        for run in flooding:
            bench.refused(run)
    share = bench.order.count("normal") / len(bench.order)
    assert share == pytest.approx(0.8, abs=0.04)


def test_a_call_of_a_normal_run_waits_for_one_unit_of_a_flooding_run() -> None:
    """One batch at a time, without a pause: in the worst case the unit in progress, and a ninth of the time of the batch."""
    bench = Bench(max_pending_calls=4)
    exceed(bench, "flood")
    durations = []
    for _ in range(50):
        bench.refused("flood")
        start = bench.clock.now
        call = bench.start("normal", units=9)
        while call in bench.calls:
            bench.compute(seconds=0.001)
        durations.append(round((bench.clock.now - start) / 0.001))
        # The next batch comes in the middle of a unit of the flooding run.
        bench.compute(seconds=0.001)
    assert max(durations) <= 9 + 2
    assert bench.order.count("flood") > 50


def test_an_idle_run_saves_little_time_for_later() -> None:
    bench = Bench()
    bench.start("early", units=1)
    bench.compute()
    bench.start("busy", units=1000)
    for _ in range(100):
        bench.compute()
    bench.start("early", units=1000)
    bench.order.clear()
    for _ in range(100):
        bench.compute(seconds=0.1)
    assert bench.order.count("busy") == pytest.approx(50 - CREDIT_SECONDS / 2 / 0.1, abs=8)


@pytest.mark.parametrize("unit_seconds", [0.01, 5.0, 20.0, 120.0])
def test_a_run_over_its_quota_has_its_share_however_long_its_units_are(unit_seconds: float) -> None:
    bench = Bench(max_pending_calls=2)
    for run in ("flood", "normal") * 2:
        bench.start(run, units=1)
    bench.refused("flood")
    seconds = {"flood": 0.0, "normal": 0.0}
    while sum(seconds.values()) < 400 * unit_seconds:
        [name] = [each.run.name for each in bench.calls if each.turn.is_set()]
        unit = unit_seconds if name == "flood" else unit_seconds / 50
        bench.compute(unit)
        seconds[name] += unit
        bench.start(name, units=1)
        if name == "flood":
            bench.refused("flood")
    assert seconds["flood"] / sum(seconds.values()) == pytest.approx(0.1, abs=0.02), seconds


def test_a_flooding_run_has_the_whole_service_if_no_other_run_waits() -> None:
    bench = Bench(max_pending_calls=2)
    exceed(bench, "flood")
    for _ in range(5):
        bench.compute()
    assert bench.order == ["flood"] * 5


def test_a_run_has_its_full_share_again_some_time_after_it_exceeded_its_quota() -> None:
    bench = Bench(max_pending_calls=1)
    exceed(bench, "once")
    bench.clock.now += MIN_RETRY_SECONDS + OVER_QUOTA_SECONDS
    bench.start("other", units=1000)
    for _ in range(20):  # The unit after the refused call still has the low weight.
        bench.compute(seconds=0.01)
    bench.order.clear()
    for _ in range(20):
        bench.compute(seconds=0.01)
    assert 9 <= bench.order.count("once") <= 11


def test_too_many_calls_are_refused_with_the_time_of_the_last_call() -> None:
    bench = Bench(max_pending_calls=2)
    bench.start("a", units=1)
    bench.compute(seconds=3.0)
    bench.start("a", units=1)
    bench.start("a", units=1)
    error = bench.refused("a")
    assert error.retry_seconds == 3.0
    assert str(error) == "run a: 2 calls are pending (max_pending_calls); try again in 3 s"
    bench.start("b", units=1)
    bench.compute()
    bench.start("a", units=1)


def test_too_many_responses_are_refused_and_a_call_that_never_fits_is_an_error() -> None:
    bench = Bench(max_pending_sequences=10)
    bench.start("a", units=1, sequences=7)
    assert "7 responses are pending, and the call has 4 (max_pending_sequences)" in str(bench.refused("a", sequences=4))
    bench.start("a", units=1, sequences=3)
    with pytest.raises(InvalidRequest, match=r"11 sequences; this shared service accepts at most 10 in a call"):
        bench.turns.admit("b", 11)


def test_a_rate_is_kept_on_average_and_a_burst_is_admitted() -> None:
    bench = Bench(max_pending_sequences=10, sequences_per_second=2.0)
    admitted = 0
    for _ in range(2):
        bench.turns.leave(bench.turns.admit("b", 5))
    assert "more than 2 responses per second" in str(bench.refused("b", 5))
    start = bench.clock.now
    while bench.clock.now < start + 100:
        try:
            call = bench.turns.admit("a", 5)
        except QuotaExceeded as refused:
            bench.clock.now += refused.retry_seconds
        else:
            admitted += 5
            bench.turns.leave(call)
    assert 2 * 100 <= admitted <= 2 * 100 + 10 + 5


def test_a_place_among_the_runs_is_free_once_a_run_is_idle() -> None:
    bench = Bench(max_runs=2)
    bench.start("a", units=1)
    bench.start("", units=1)
    error = bench.refused("c")
    assert error.retry_seconds == CROWDED_RETRY_SECONDS
    assert "2 other runs use this shared service" in str(error)
    bench.compute()
    bench.start("c", units=1)
    assert [usage.run for usage in bench.turns.usage()] == [UNNAMED, "c"]


def test_usage_counts_pending_scored_and_refused_work() -> None:
    bench = Bench(max_pending_calls=1)
    bench.start("a", units=2, sequences=5)
    bench.refused("a")
    bench.compute(seconds=0.5)
    assert bench.usage("a") == RunUsage("a", pending_sequences=5, scored_sequences=0, refused_calls=1, seconds=0.5)
    bench.compute(seconds=0.5)
    assert bench.usage("a") == RunUsage("a", pending_sequences=0, scored_sequences=5, refused_calls=1, seconds=1.0)


def test_a_call_that_leaves_in_its_turn_passes_it_on() -> None:
    bench = Bench()
    first, second = bench.start("a", units=1), bench.start("b", units=1)
    assert (first.turn.is_set(), second.turn.is_set()) == (True, False)
    bench.turns.leave(first, scored=False)
    assert (first.turn.is_set(), second.turn.is_set()) == (False, True)
    bench.turns.end_turn(first, 1.0)  # Its unit of work ends later.
    assert second.turn.is_set()
    assert bench.usage("a").scored_sequences == 0


def test_a_waiting_call_that_leaves_gets_no_turn() -> None:
    bench = Bench()
    bench.start("a", units=1)
    waiting = bench.start("b", units=1)
    bench.turns.leave(waiting, scored=False)
    bench.turns.leave(waiting, scored=False)
    bench.compute()
    assert not waiting.turn.is_set()


def test_more_threads_than_the_service_has_are_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match="max_runs 64 x max_pending_calls 64: expected at most 512"):
        SharingConfig(max_runs=64, max_pending_calls=64)
