"""Failed scoring calls: the retries, and the decision if a service or a trajectory is at fault."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import RecoveryConfig
from quartet.errors import (
    Cancelled,
    ComputationFailed,
    FailedPrecondition,
    ModelError,
    NoResponse,
    OutOfMemory,
    QuartetError,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
    TooManyFailedTrajectories,
)
from quartet.services.orchestrator.rollout.scoring import Scoring, ScoringServices
from tests.buffer.samples import forked
from tests.services.orchestrator.fake_services import Scorer
from tests.services.orchestrator.rollout.failing_services import (
    ALWAYS,
    SERVICES,
    Actor,
    FailingScorer,
    Name,
    assert_own_results,
    collect,
    failed_trajectories,
    recovery_config,
    sampled,
    scored,
)


@pytest.mark.parametrize("service", SERVICES)
def test_a_transient_failure_is_retried_with_the_same_batch(service: str, stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), **{service: {(1, 0): 1}})
    actor = Actor(stream, run)
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(5)], actor)
    assert scored(step) == [(prompt, 0) for prompt in range(5)]
    assert_own_results(step)
    assert step.failed_trajectories == []
    assert actor.requests == []
    batch, rest = [(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0)]
    assert sorted(scorer.requests[service]) == sorted([batch, rest, batch]), "the retry has another batch"


def test_a_failure_that_ends_during_single_attempts_fails_no_trajectory(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ServiceFailed("no"), score={(1, 0): 3})
    recovery = recovery_config(max_scoring_attempts=4)
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run), recovery=recovery)
    assert scored(step) == [(0, 0), (1, 0), (2, 0)]
    assert_own_results(step)
    assert step.failed_trajectories == []
    batch = [(0, 0), (1, 0), (2, 0)]
    assert scorer.requests["score"] == [batch, batch, [(0, 0)], [(1, 0)], [(1, 0)], [(2, 0)]]


@pytest.mark.parametrize(
    ("attempts", "batched", "single", "counted"), [(1, 1, 1, 2), (2, 1, 1, 2), (3, 2, 1, 3), (6, 2, 4, 6)]
)
def test_batch_and_single_attempts_are_counted_per_trajectory(
    attempts: int, batched: int, single: int, counted: int, stream: RolloutStream, run: str
) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    recovery = recovery_config(max_scoring_attempts=attempts)
    written = [sampled(run, prompt) for prompt in range(2)]
    step = collect(stream, scorer, written, Actor(stream, run), recovery=recovery)
    assert failed_trajectories(step) == [((1, 0), counted)]
    batch = [(0, 0), (1, 0)]
    assert scorer.requests["score"] == [batch] * batched + [[(0, 0)]] + [[(1, 0)]] * single + [[(1, 1)]]


def test_a_batch_with_one_trajectory_is_attempted_up_to_the_limit(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(
        stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run), score_batch_size=1
    )
    assert failed_trajectories(step) == [((1, 0), 3)]
    assert scorer.requests["score"] == [[(0, 0)], [(1, 0)], [(1, 0)], [(1, 0)], [(1, 1)]]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "error",
    [
        NoResponse("late"),
        OutOfMemory("gpu"),
        ModelError("no"),
        ServiceUnavailable("gone"),
        ServiceBusy("full"),
        FailedPrecondition("no"),
        Cancelled("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_the_service_is_raised_at_once(
    service: str, error: QuartetError, stream: RolloutStream, run: str
) -> None:
    scorer = FailingScorer(error, **{service: {(1, 0): 1}})
    with pytest.raises(type(error), match=str(error)):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert len(scorer.requests[service]) == 1


def test_a_lost_service_is_raised_during_a_retry_of_an_earlier_batch(run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), blocked=True, score={(0, 0): ALWAYS})
    scoring = scoring_of(scorer, [[0, 1], [2, 3]], run)
    scorer.calls["score"][0].complete()
    scoring.advance()
    scoring.advance()
    scorer.calls["score"][1].complete(ServiceUnavailable("gone"))
    with pytest.raises(ServiceUnavailable, match="gone"):
        scoring.advance()


def test_the_fields_of_a_prompt_are_sent_with_every_attempt(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    fields = {prompt: f'{{"a":{prompt}}}' for prompt in range(3)}
    collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run), fields=fields)
    for request, fields_sent in zip(scorer.requests["score"], scorer.fields, strict=True):
        assert fields_sent == [fields[prompt] for prompt, _ in request]


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SkippingClock(Clock):
    """A clock that jumps ahead at every reading, so that every pause is over."""

    def __call__(self) -> float:
        self.now += 1e6
        return self.now


def scoring_of(
    scorer: FailingScorer,
    batches: list[list[int]],
    run: str,
    recovery: RecoveryConfig | None = None,
    clock: Clock | None = None,
) -> Scoring:
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    scoring = Scoring(services, {}, recovery or RecoveryConfig(), clock or SkippingClock())
    for batch in batches:
        scoring.start([sampled(run, prompt) for prompt in batch])
    return scoring


def test_a_retry_sends_the_last_branch_again(run: str) -> None:
    scorer = Scorer(failure=ServiceFailed("not now"), fails_at="score")
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    scoring = Scoring(services, {}, RecoveryConfig(max_scoring_attempts=4), SkippingClock())
    scoring.start([forked(run, 1), forked(run, 2)])
    scoring.advance()
    while len(scorer.batches) < 3:
        scoring.advance()
    scorer._fails_at = ""
    while scoring.batches_in_flight:
        scoring.advance()
    both = [[2, 2, 70, 51, 60], [3, 2, 70, 52, 60]]
    assert [[ids.tolist() for ids in batch.sequences()] for batch in scorer.batches[:2]] == [both, both]
    assert all(len(batch) == 1 and batch.sequences()[0][2] == 70 for batch in scorer.batches[2:])
    assert [(item.trajectory.id.prompt, item.score) for item in scoring.scored] == [(1, 2.0), (2, 3.0)]


def complete_in_order(order: Iterable[int], scorer: FailingScorer, scoring: Scoring) -> None:
    """Complete the calls of the first batches in this order, then all further calls."""
    calls = [call for service in SERVICES for call in scorer.calls[service]]
    for index in order:
        calls[index].complete()
        scoring.advance()
    while scoring.batches_in_flight:
        for service in SERVICES:
            for call in scorer.calls[service]:
                if not call.done():
                    call.complete()
        scoring.advance()


def test_requests_and_failures_do_not_depend_on_the_order_of_responses(run: str) -> None:
    batches = [[0, 1], [2, 3], [4, 5]]
    outcomes = []
    for seed in range(40):
        scorer = FailingScorer(
            ComputationFailed("no"),
            blocked=True,
            score={(1, 0): ALWAYS, (3, 0): 1, (5, 0): ALWAYS},
            values={(0, 0): ALWAYS, (5, 0): 2},
        )
        scoring = scoring_of(scorer, batches, run)
        complete_in_order(np.random.default_rng(seed).permutation(9).tolist(), scorer, scoring)
        failures = sorted((str(item.trajectory.id), item.attempts, item.error) for item in scoring.failed_trajectories)
        result = sorted(str(item.trajectory.id) for item in scoring.scored)
        outcomes.append((scorer.requests, failures, result))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    requests, failures, result = outcomes[0]
    assert requests["score"] == [
        [(0, 0), (1, 0)],
        [(2, 0), (3, 0)],
        [(4, 0), (5, 0)],
        [(0, 0), (1, 0)],
        [(0, 0)],
        [(1, 0)],
        [(2, 0), (3, 0)],
        [(4, 0), (5, 0)],
        [(4, 0)],
        [(5, 0)],
    ]
    assert [id.split("/")[2] for id, _, _ in failures] == ["0", "1", "5"]
    assert [id.split("/")[2] for id in result] == ["2", "3", "4"]


def test_cancel_includes_the_retry_of_a_batch(run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), blocked=True, score={(0, 0): ALWAYS})
    scoring = scoring_of(scorer, [[0, 1]], run)
    scorer.calls["score"][0].complete()
    scoring.advance()
    scoring.advance()
    assert len(scorer.calls["score"]) == 2
    scoring.cancel()
    assert scorer.calls["score"][1].cancelling
    assert scorer.calls["log_probs"][0].cancelling
    assert scorer.calls["values"][0].cancelling


@pytest.mark.parametrize("pauses", [[2.0, 4.0], [2.0, 4.0, 8.0], [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]])
def test_pauses_between_attempts_double_and_do_not_block_other_services(pauses: list[float], run: str) -> None:
    scorer, clock = FailingScorer(ComputationFailed("no"), blocked=True, score={(0, 0): ALWAYS}), Clock()
    recovery = RecoveryConfig(backoff_seconds=2.0, max_scoring_attempts=len(pauses) + 1)
    scoring = scoring_of(scorer, [[0], [1]], run, recovery, clock)
    for attempt, pause in enumerate(pauses):
        scorer.calls["score"][1 + attempt if attempt else 0].complete()
        scoring.advance()
        clock.now += pause * 0.99
        scoring.advance()
        assert scorer.requests["score"].count([(0, 0)]) == attempt + 1, "the retry started before the pause was over"
        clock.now += pause * 0.02
        scoring.advance()
        assert scorer.requests["score"].count([(0, 0)]) == attempt + 2
        # Responses are processed during the pause and after it.
        for service in SERVICES:
            scorer.calls[service][1].complete()
            if service != "score":
                scorer.calls[service][0].complete()
        scoring.advance()
        assert [item.trajectory.id.prompt for item in scoring.scored] == [1]
    scorer.calls["score"][-1].complete()
    scoring.advance()
    assert [(item.trajectory.id.prompt, item.attempts) for item in scoring.failed_trajectories] == [
        (0, len(pauses) + 1)
    ]
    assert scoring.batches_in_flight == 0


def test_a_response_is_processed_while_an_earlier_batch_pauses(run: str) -> None:
    scorer, clock = FailingScorer(ComputationFailed("no"), blocked=True, score={(0, 0): ALWAYS}), Clock()
    scoring = scoring_of(scorer, [[0, 1], [2, 3]], run, RecoveryConfig(), clock)
    scorer.calls["score"][0].complete()
    scoring.advance()
    for service in SERVICES:
        scorer.calls[service][1].complete()
    scoring.advance()
    assert [item.trajectory.id.prompt for item in scoring.scored] == [2, 3]
    assert scoring.batches_in_flight == 1


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_fails_for_a_whole_batch_is_at_fault(service: str, stream: RolloutStream, run: str) -> None:
    failures = {(prompt, 0): ALWAYS for prompt in range(3)}
    scorer, actor = FailingScorer(ServiceFailed("broken"), **{service: failures}), Actor(stream, run)
    with pytest.raises(ServiceFailed, match=r"broken of 1; .*/1/0/0, .*/1/1/0, .*/1/2/0$"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(6)], actor)
    assert actor.requests == []


def test_a_service_that_scores_one_of_a_batch_is_not_at_fault(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ServiceFailed("broken"), score={(0, 0): ALWAYS, (1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert [name for name, _ in failed_trajectories(step)] == [(0, 0), (1, 0)]
    assert scored(step) == [(0, 1), (1, 1), (2, 0)]


def test_computations_that_fail_for_a_whole_batch_fail_its_trajectories(stream: RolloutStream, run: str) -> None:
    scorer = FailingScorer(ComputationFailed("no"), score={(prompt, 0): ALWAYS for prompt in range(3)})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert [name for name, _ in failed_trajectories(step)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("others", [ServiceFailed, ComputationFailed])
def test_a_service_that_always_fails_is_at_fault_beyond_the_limit(
    others: type[QuartetError], stream: RolloutStream, run: str
) -> None:
    class MixedErrorScorer(FailingScorer):
        def _error_for(self, batch_names: list[Name]) -> QuartetError:
            return (others if batch_names == [(1, 0)] else ServiceFailed)("broken")

    scorer = MixedErrorScorer(ServiceFailed("broken"), score={(prompt, 0): ALWAYS for prompt in range(9)})
    written = [sampled(run, prompt) for prompt in range(9)]
    with pytest.raises(
        ServiceFailed if others is ServiceFailed else TooManyFailedTrajectories, match="step 1: 3 of its"
    ):
        collect(
            stream,
            scorer,
            written,
            Actor(stream, run),
            score_batch_size=9,
            recovery=recovery_config(max_failed_trajectories=2),
        )
