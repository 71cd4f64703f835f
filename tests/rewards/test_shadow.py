"""Shadows of an ensemble: parts with weight 0 that are scored, and on which nothing depends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import Cancelled, ComputationFailed, ConfigError, FailedPrecondition, MismatchError, ServiceFailed
from quartet.rewards.ensemble import EnsemblePart, EnsembleReward
from quartet.rewards.reward_source import never
from quartet.rewards.shadow import SourceThread
from tests.unit.models import tiny
from tests.waiting import LIMIT

BATCH = tiny.batch([3, 1, 9], [4, 7, 1], seed=5)
NAN = np.float32(np.nan)
HALF_FAILED = Scores(
    np.array([1, NAN, NAN], np.float32),
    outcomes=(Outcome.OK, Outcome.SCORER_ERROR, Outcome.TIMEOUT),
    details=("", "a", "b"),
)


class Source:
    """A source that returns these scores, or raises, once ``released``."""

    def __init__(self, answer: Sequence[float] | Scores | Exception, parameters: int = 0) -> None:
        self._answer, self._parameters = answer, parameters
        self.released, self.calls = threading.Event(), 0
        self.released.set()

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        self.calls += 1
        while not self.released.wait(0.005):
            if cancelled():
                raise Cancelled("scoring was cancelled by its caller")
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer if isinstance(self._answer, Scores) else Scores(np.array(self._answer, np.float32))

    def status(self) -> ServiceStatus:
        return ServiceStatus(Role.REWARD, model="m", device="cpu", parameters=self._parameters)

    def close(self) -> None:
        self.released.set()


@pytest.fixture
def ensemble() -> Iterator[Callable[..., EnsembleReward]]:
    """Return a function that builds an ensemble of (weight, source) by name."""
    with ExitStack() as stack:

        def build(seconds: float = 60.0, **parts: tuple[float, Source]) -> EnsembleReward:
            made = EnsembleReward(
                [EnsemblePart(name, weight, source) for name, (weight, source) in parts.items()], seconds
            )
            stack.callback(made.close)
            return made

        yield build


TAUGHT = [0.1, -2.5, 7.0]


def test_a_shadow_is_scored_and_adds_nothing(ensemble: Callable[..., EnsembleReward]) -> None:
    scores = ensemble(taught=(1.0, Source(TAUGHT)), shadow=(0.0, Source([5.0, 6.0, 7.0]))).score(BATCH)
    assert scores.total.tobytes() == np.array(TAUGHT, np.float32).tobytes()
    assert scores.parts["shadow"].tolist() == [5.0, 6.0, 7.0]
    assert scores.outcomes == ()


@pytest.mark.parametrize("parameters", [0, 7], ids=["function", "model"])
@pytest.mark.parametrize(
    "fault",
    [
        HALF_FAILED,
        ServiceFailed("the scorer does not respond"),
        ComputationFailed("2 of 3 scores are not finite"),
        ConfigError("the key is refused"),
        FailedPrecondition("cannot be imported any more"),
        Scores(np.full(3, NAN), outcomes=(Outcome.REFUSED,) * 3),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_fault_of_a_shadow_is_a_missing_score_and_no_failure(
    fault: Scores | Exception, parameters: int, ensemble: Callable[..., EnsembleReward]
) -> None:
    scores = ensemble(taught=(1.0, Source(TAUGHT)), shadow=(0.0, Source(fault, parameters))).score(BATCH)
    assert scores.total.tobytes() == np.array(TAUGHT, np.float32).tobytes()
    assert scores.outcomes == ()
    expected = fault.total if isinstance(fault, Scores) else np.full(3, NAN)
    np.testing.assert_array_equal(scores.parts["shadow"], expected)


def test_an_unexpected_exception_of_a_shadow_is_contained(ensemble: Callable[..., EnsembleReward]) -> None:
    scores = ensemble(taught=(1.0, Source(TAUGHT)), shadow=(0.0, Source(RuntimeError("no")))).score(BATCH)
    assert np.isnan(scores.parts["shadow"]).all()
    assert scores.outcomes == ()


def test_the_failure_of_a_weighted_part_is_the_failure_of_the_response(ensemble: Callable[..., EnsembleReward]) -> None:
    scores = ensemble(taught=(1.0, Source(HALF_FAILED)), shadow=(0.0, Source(TAUGHT))).score(BATCH)
    assert scores.outcomes == (Outcome.OK, Outcome.SCORER_ERROR, Outcome.TIMEOUT)
    assert scores.parts["shadow"].tolist() == np.array(TAUGHT, np.float32).tolist()


def test_a_shadow_that_hangs_is_given_up_and_then_left_out(ensemble: Callable[..., EnsembleReward]) -> None:
    hanging = Source(TAUGHT)
    hanging.released.clear()
    source = ensemble(0.05, taught=(1.0, Source(TAUGHT)), shadow=(0.0, hanging))
    for _ in range(3):
        scores = source.score(BATCH)
        assert scores.outcomes == ()
        assert np.isnan(scores.parts["shadow"]).all()
    assert hanging.calls == 1


def test_a_shadow_that_hangs_rests_ten_times_as_long_as_the_run_has_waited() -> None:
    now, hanging = [100.0], Source(TAUGHT)
    thread = SourceThread("reward.parts.shadow", hanging, clock=lambda: now[0])
    hanging.released.clear()
    call = thread.start_shadow(BATCH, (), never)

    def later() -> bool:
        now[0] += 1.0
        return False

    assert np.isnan(thread.finish(call, 103.0, later).total).all()
    assert call.future is not None
    with pytest.raises(Cancelled):
        call.future.result(LIMIT)
    hanging.released.set()
    now[0] = 132.9
    assert thread.start_shadow(BATCH, (), never).future is None
    now[0] = 133.1
    scores = thread.finish(thread.start_shadow(BATCH, (), never), 1e9, never)
    assert scores.total.tolist() == np.array(TAUGHT, np.float32).tolist()
    thread.close()


def test_a_part_that_gets_a_weight_waits_for_its_call_as_a_shadow(ensemble: Callable[..., EnsembleReward]) -> None:
    slow = Source([1.0, 2.0, 3.0])
    slow.released.clear()
    source = ensemble(0.05, taught=(1.0, Source(TAUGHT)), shadow=(0.0, slow))
    assert np.isnan(source.score(BATCH).parts["shadow"]).all()
    slow.released.set()
    # On a busy machine, a shadow that is ready may need more than the time that the first call had.
    source._shadow_timeout = 60.0
    scores = source.score(BATCH, weights={"taught": 0.0, "shadow": 1.0})
    assert scores.total.tolist() == [1.0, 2.0, 3.0]
    assert scores.parts["taught"].tolist() == np.array(TAUGHT, np.float32).tolist()


def test_the_weights_of_a_request_replace_those_of_the_config(ensemble: Callable[..., EnsembleReward]) -> None:
    source = ensemble(a=(1.0, Source([1.0, 2.0, 3.0])), b=(0.0, Source(HALF_FAILED)))
    before, switched, after = (
        source.score(BATCH, weights=weights) for weights in (None, {"a": 0.0, "b": 2.0}, {"a": 1.0, "b": 0.0})
    )
    assert before.total.tolist() == after.total.tolist() == [1.0, 2.0, 3.0]
    assert switched.total[0] == 2.0
    assert switched.outcomes == (Outcome.OK, Outcome.SCORER_ERROR, Outcome.TIMEOUT)


@pytest.mark.parametrize("weights", [{"a": 1.0}, {"a": 1.0, "c": 1.0}, {"a": 0.0, "b": 0.0}])
def test_weights_of_other_parts_and_no_weight_at_all_are_refused(
    weights: Mapping[str, float], ensemble: Callable[..., EnsembleReward]
) -> None:
    source = ensemble(a=(1.0, Source(TAUGHT)), b=(0.0, Source(TAUGHT)))
    with pytest.raises(MismatchError, match="expected one for each of a, b, not all 0"):
        source.score(BATCH, weights=weights)


def test_a_caller_that_no_longer_waits_does_not_wait_for_a_shadow(ensemble: Callable[..., EnsembleReward]) -> None:
    hanging = Source(TAUGHT)
    hanging.released.clear()
    source = ensemble(taught=(1.0, Source(TAUGHT)), shadow=(0.0, hanging))
    with pytest.raises(Cancelled):
        source.score(BATCH, cancelled=lambda: True)
    # The shadow ends with this error before the caller waits for it.
    cancelled_itself = ensemble(taught=(1.0, Source(TAUGHT)), shadow=(0.0, Source(Cancelled("by its caller"))))
    with pytest.raises(Cancelled):
        cancelled_itself.score(BATCH, cancelled=lambda: True)
