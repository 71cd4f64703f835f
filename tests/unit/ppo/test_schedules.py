"""Learning rate schedules: their ends, and the curve between them."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.learning_rate import ScheduleKind, scheduled_learning_rate

KIND = pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])


def rates(kind: ScheduleKind, total: int, warmup: int, peak: float = 0.8, final: float = 0.2) -> list[float]:
    """Return the learning rates of steps 1..total."""
    return [scheduled_learning_rate(step, total, peak, final, warmup, kind) for step in range(1, total + 1)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.4, 0.8, 0.8, 0.8, 0.8, 0.8]),
        ("linear", [0.4, 0.8, 0.8, 0.65, 0.5, 0.35]),
        ("cosine", [0.4, 0.8, 0.8, 0.5 + 0.3 * math.sqrt(0.5), 0.5, 0.5 - 0.3 * math.sqrt(0.5)]),
    ],
)
def test_a_worked_example_with_two_warm_up_steps(kind: ScheduleKind, expected: list[float]) -> None:
    assert rates(kind, 6, 2) == pytest.approx(expected, rel=1e-12)


@KIND
@given(total=st.integers(1, 300), data=st.data(), peak=st.floats(1e-9, 1.0), share=st.floats(0, 1))
def test_the_first_and_last_rates_are_exact_and_all_rates_are_in_range(
    kind: ScheduleKind, total: int, data: st.DataObject, peak: float, share: float
) -> None:
    warmup, final = data.draw(st.integers(0, total)), peak * share
    result = rates(kind, total, warmup, peak, final)
    if warmup:
        assert result[warmup - 1] == peak
        assert result[0] == pytest.approx(peak / warmup)
    if warmup < total:
        assert result[warmup] == pytest.approx(peak)
        assert scheduled_learning_rate(total + 1, total, peak, final, warmup, kind) == (
            peak if kind == "constant" else final
        )
    assert result[:warmup] == sorted(result[:warmup])
    after = result[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 * peak for a, b in itertools.pairwise(after))
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in result), "every step must have a positive rate"


@pytest.mark.parametrize(("kind", "after"), [("constant", 0.8), ("linear", 0.2), ("cosine", 0.2)])
def test_a_step_beyond_the_run_has_the_final_rate(kind: ScheduleKind, after: float) -> None:
    assert scheduled_learning_rate(99, 6, 0.8, 0.2, 2, kind) == after


@KIND
def test_a_warm_up_as_long_as_the_run_ends_at_the_peak(kind: ScheduleKind) -> None:
    assert rates(kind, 4, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_linear_and_cosine_differ_between_the_ends() -> None:
    linear, cosine = rates("linear", 8, 0), rates("cosine", 8, 0)
    assert linear[4] == pytest.approx(cosine[4])
    assert cosine[1] > linear[1] + 0.01
    assert cosine[7] < linear[7] - 0.01


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 0},
        {"total_steps": 0},
        {"warmup_steps": -1},
        {"peak": -1.0},
        {"final": math.nan},
        {"peak": math.inf},
    ],
)
def test_invalid_schedules_are_refused(wrong: dict[str, float]) -> None:
    good = {"step": 1, "total_steps": 2, "peak": 0.1, "final": 0.0, "warmup_steps": 0}
    with pytest.raises(InvalidRequest):
        scheduled_learning_rate(**{**good, **wrong}, kind="linear")  # type: ignore[arg-type]
