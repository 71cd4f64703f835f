"""Collection of a step from a real stream: batch composition, duplicates, failures and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.contract.trajectory import TokenBatch, Trajectory, VersionSpan
from quartet.errors import BufferFailed, Cancelled, ConfigError, ServiceFailed
from quartet.services.orchestrator.rollout import collector as collector_module
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector
from quartet.services.orchestrator.rollout.scoring import Scoring, ScoringServices
from quartet.services.orchestrator.rollout.scoring_queue import max_batches_in_flight
from quartet.services.orchestrator.service_clients import wait_for_all
from tests.buffer.samples import forked, trajectory
from tests.services.orchestrator.fake_services import FakeCall, FakeGeneration, Scorer, responses
from tests.services.orchestrator.rollout.failing_services import batch_of, ended_generation
from tests.waiting import LIMIT


@contextmanager
def collector_of(
    stream: RolloutStream, scorer: Scorer, score_batch_size: int = 3, critic: bool = True
) -> Iterator[Collector]:
    services = ScoringServices(scorer, scorer, scorer if critic else None, 0.7)  # type: ignore[arg-type]
    collector = Collector(stream, services, score_batch_size)
    try:
        yield collector
    finally:
        collector.reset()


def ignore(num_scored: int) -> None:
    """Observe no progress."""


def collect(
    stream: RolloutStream,
    scorer: Scorer,
    expected: list[Trajectory],
    generation: FakeGeneration | None = None,
    score_batch_size: int = 3,
    progress: list[int] | None = None,
    critic: bool = True,
    fields: dict[int, str] | None = None,
) -> CollectedStep:
    counts = progress if progress is not None else []
    with collector_of(stream, scorer, score_batch_size, critic) as collector:
        return collector.collect(batch_of(expected), generation or ended_generation(), counts.append, fields)


def first_tokens(scorer: Scorer) -> list[list[int]]:
    return [[int(sequence[0]) - 1 for sequence in batch.sequences()] for batch in scorer.batches]


def test_each_trajectory_has_its_results_and_trajectories_are_sorted_by_id(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt, response=1 + prompt % 4) for prompt in (10, 2, 7, 1, 30, 4, 5)]
    stream.append(written)
    scorer, counts = Scorer(), []
    step = collect(stream, scorer, written, progress=counts)
    assert [item.trajectory.id.prompt for item in step.scored] == [1, 2, 4, 5, 7, 10, 30]
    for item in step.scored:
        response = item.trajectory.response_ids.astype(np.float32)
        assert item.score == item.trajectory.id.prompt + 1
        np.testing.assert_array_equal(item.reference_log_probs, -response)
        np.testing.assert_array_equal(item.values, 2 * response)
    assert scorer.temperatures == {0.7}
    assert counts[-1] == 7
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_reward_sources_score_the_last_branch_and_the_other_services_every_branch(
    stream: RolloutStream, run: str
) -> None:
    written = [trajectory(run, 0), forked(run, 1), forked(run, 2), trajectory(run, 3)]
    stream.append(written)
    scorer = Scorer()
    step = collect(stream, scorer, written, score_batch_size=4)
    assert [[ids.tolist() for ids in batch.sequences()] for batch in scorer.batches] == [
        [[1, 2, 0, 1, 2], [2, 2, 70, 51, 60], [3, 2, 70, 52, 60], [4, 2, 3, 4, 5]]
    ]
    assert [len(item.values) for item in step.scored] == [3, 5, 5, 3]
    for item in step.scored:
        response = item.trajectory.response_ids.astype(np.float32)
        np.testing.assert_array_equal(item.reference_log_probs, -response)
        np.testing.assert_array_equal(item.values, 2 * response)


def test_batches_are_neighbours_in_the_order_of_the_ids_however_entries_arrive(stream: RolloutStream, run: str) -> None:
    order = [8, 3, 5, 1, 9, 2, 7]
    for portions in ([7], [1] * 7, [2, 4, 1], [3, 3, 1], [5, 2]):
        stream.reset()
        written = [trajectory(run, prompt) for prompt in order]
        scorer, generation, remaining = Scorer(), FakeGeneration(), list(written)
        with ThreadPoolExecutor(1) as executor:
            step = executor.submit(collect, stream, scorer, written, generation)
            for portion in portions:
                stream.append(remaining[:portion])
                remaining = remaining[portion:]
            generation.complete()
            assert len(step.result(timeout=LIMIT).scored) == 7
        # A batch starts when its last trajectory arrives.
        assert first_tokens(scorer) == [[9], [1, 2, 3], [5, 7, 8]]


def test_scoring_starts_before_generation_ends(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(4)]
    scorer, generation, counts = Scorer(), FakeGeneration(), []
    with ThreadPoolExecutor(1) as executor:
        step = executor.submit(collect, stream, scorer, written, generation, 3, counts)
        stream.append(written[:3])
        while not scorer.batches or not counts or counts[-1] < 3:
            assert not step.done()
        assert first_tokens(scorer) == [[0, 1, 2]]
        stream.append(written[3:])
        generation.complete()
        step.result(timeout=LIMIT)
    assert first_tokens(scorer) == [[0, 1, 2], [3]]


def test_a_duplicate_is_scored_once_and_all_its_entries_are_acknowledged(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(5)]
    repeated = [*written[:4], *written[:2], written[4]]
    stream.append(repeated)
    scorer = Scorer()
    step = collect(stream, scorer, written)
    assert first_tokens(scorer) == [[0, 1, 2], [3, 4]]
    assert len(step.scored) == 5
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_a_trajectory_of_an_abandoned_call_is_dropped_whatever_it_contains(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(3)]
    late = [
        replace(written[0], policy_version=9, attempt=7, segments=written[2].segments),
        replace(trajectory(run, 8), attempt=7),
    ]
    stream.append([*late, *written])
    generation = ended_generation()
    generation.abandoned_attempts = {7}
    scorer = Scorer()
    step = collect(stream, scorer, written, generation)
    assert [item.trajectory.attempt for item in step.scored] == [0, 0, 0]
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


@pytest.fixture
def _short_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "QUIET_SECONDS", 0.1)


@pytest.mark.usefixtures("_short_quiet")
def test_trajectories_of_abandoned_calls_do_not_replace_lost_ones(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(2)]
    stream.append([written[0], replace(written[1], attempt=7)])
    generation = ended_generation()
    generation.abandoned_attempts = {7}
    with pytest.raises(BufferFailed, match="1 of 2 trajectories"):
        collect(stream, Scorer(), written, generation)


def test_late_duplicates_do_not_reach_the_next_step(stream: RolloutStream, run: str) -> None:
    first = [trajectory(run, prompt) for prompt in range(3)]
    second = [trajectory(run, prompt, step=2) for prompt in range(3)]
    with collector_of(stream, Scorer()) as collector:
        stream.append([*first, *first])
        stream.acknowledge(collector.collect(batch_of(first), ended_generation(), ignore).entry_ids)
        stream.append(second)
        step = collector.collect(batch_of(second), ended_generation(), ignore)
    assert [item.trajectory.id.step for item in step.scored] == [2, 2, 2]
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_trajectories_of_later_steps_wait_for_their_collection(stream: RolloutStream, run: str) -> None:
    steps = [[trajectory(run, prompt, step=step) for prompt in range(5)] for step in (1, 2, 3)]
    scorer, entry_ids = Scorer(), list[str]()
    with collector_of(stream, scorer) as collector:
        # Step 3 comes first, and step 2 partly before step 1.
        stream.append([*steps[2], *steps[1][:2], *steps[0]])
        for written, later in zip(steps, (steps[1][2:], [], []), strict=True):
            step = collector.collect(batch_of(written), ended_generation(), ignore)
            assert [item.trajectory.id for item in step.scored] == [item.id for item in written]
            assert len(step.entry_ids) == 5
            entry_ids += step.entry_ids
            stream.append(later)
        # Nothing was lost between the steps: a search for lost deliveries would have waited.
        assert first_tokens(scorer) == [[0, 1, 2], [3, 4]] * 3
    stream.acknowledge(entry_ids)
    assert stream.depth() == 0


def test_a_lost_connection_between_two_steps_loses_no_trajectory(stream: RolloutStream, run: str) -> None:
    first, second = ([trajectory(run, prompt, step=step) for prompt in range(3)] for step in (1, 2))
    with collector_of(stream, Scorer()) as collector:
        stream.append(first)
        collector.collect(batch_of(first), ended_generation(), ignore)
        collector._events.put(BufferFailed("the connection was lost"))
        stream.append(second)
        assert len(collector.collect(batch_of(second), ended_generation(), ignore).scored) == 3


@pytest.mark.usefixtures("_short_quiet")
def test_missing_trajectories_at_the_end_of_generation_are_an_error(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(5)]
    stream.append(written[:4])
    scorer = Scorer(blocked=True)
    with pytest.raises(BufferFailed, match="generation ended with 4 of 5 trajectories in the stream"):
        collect(stream, scorer, written)
    assert [call.cancelling for call in scorer.calls] == [True] * 3


def test_an_unrequested_trajectory_is_an_error(stream: RolloutStream, run: str) -> None:
    requested = [trajectory(run, prompt) for prompt in range(2)]
    for unrequested in (trajectory(run, 99), trajectory(run, 1, sample=1), trajectory("other", 1, step=0)):
        stream.reset()
        stream.append([requested[0], unrequested])
        generation = FakeGeneration()
        with pytest.raises(BufferFailed, match=f"{unrequested.id} of policy version .* was not requested"):
            collect(stream, Scorer(), requested, generation)
        assert generation.cancelling


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"policy_version": 7},
            "1/1/0 is of policy version 7 and digest none, requested were version 0 and digest none",
        ),
        (
            {"weights_digest": b"0123456789abcdef", "generator": "here:1"},
            "generator here:1: .*/1/1/0 is of policy version 0 and",
        ),
    ],
)
def test_a_trajectory_of_other_weights_is_refused_by_name(
    change: dict[str, Any], reason: str, stream: RolloutStream, run: str
) -> None:
    requested = [trajectory(run, prompt) for prompt in range(2)]
    stream.append([requested[0], replace(requested[1], **change)])
    generation = FakeGeneration()
    with pytest.raises(BufferFailed, match=reason):
        collect(stream, Scorer(), requested, generation)
    assert generation.cancelling


def test_a_failed_generation_is_raised_and_cancels_scoring(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(5)]
    stream.append(written[:3])
    scorer, generation = Scorer(blocked=True), FakeGeneration()
    with ThreadPoolExecutor(1) as executor:
        step = executor.submit(collect, stream, scorer, written, generation)
        while len(scorer.calls) < 3:
            assert not step.done()
        generation.complete(ServiceFailed("actor: gone"))
        with pytest.raises(ServiceFailed, match="actor: gone"):
            step.result(timeout=LIMIT)
    assert [call.cancelling for call in scorer.calls] == [True] * 3


def test_a_collection_ends_with_its_generation_after_another_thread_has_reset_the_collector(
    stream: RolloutStream, run: str
) -> None:
    scorer, generation, waiting = Scorer(), FakeGeneration(), threading.Event()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 0.7), 3)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as executor:
        step = executor.submit(collector.collect, batch_of([trajectory(run, 0)]), generation, lambda _: waiting.set())
        assert waiting.wait(LIMIT)
        # As when the process ends: first the collector is reset, then the generation is cancelled.
        collector.reset()
        generation.cancel()
        with pytest.raises(Cancelled):
            step.result(timeout=LIMIT)


@pytest.mark.parametrize("service", ["score", "log_probs", "values"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_failed_scoring_call_is_raised_and_cancels_the_rest(
    service: str, complete: bool, stream: RolloutStream, run: str
) -> None:
    written = [trajectory(run, prompt) for prompt in range(3 if complete else 6)]
    stream.append(written[:3])
    scorer = Scorer(blocked=True, failure=ServiceFailed("scorer: no"), fails_at=service)
    generation = FakeGeneration()
    with pytest.raises(ServiceFailed, match="scorer: no"):
        collect(stream, scorer, written, generation)
    assert generation.cancelling
    assert [call.cancelling for call in scorer.calls] == [True] * 3


def test_waiting_raises_the_first_failure_while_other_calls_are_in_flight() -> None:
    hanging, failed = FakeCall(), FakeCall()
    failed.complete(ServiceFailed("no"))
    for calls in ([hanging, failed], [failed, hanging]):
        with pytest.raises(ServiceFailed):
            wait_for_all(calls)  # type: ignore[arg-type]


def test_waiting_reports_each_call_that_ends_and_returns_after_the_last() -> None:
    calls, ended_counts = [FakeCall(), FakeCall(), FakeCall()], []

    def on_end() -> None:
        ended_counts.append(sum(call.done() for call in calls))
        if len(ended_counts) <= len(calls):
            calls[len(ended_counts) - 1].complete()

    wait_for_all(calls, on_end)  # type: ignore[arg-type]
    assert ended_counts == [0, 1, 2, 3]


def test_the_number_of_batches_in_flight_is_limited(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in range(20)]
    stream.append(written)
    scorer = Scorer(blocked=True)
    with ThreadPoolExecutor(1) as executor:
        collecting = executor.submit(collect, stream, scorer, written, score_batch_size=1)
        completed = 0
        while not collecting.done():
            active_calls = [call for call in scorer.calls if not call.done()]
            assert len(active_calls) <= 3 * max_batches_in_flight(1)
            if len(active_calls) == min(3 * max_batches_in_flight(1), 3 * 20 - completed):
                for call in active_calls[:3]:
                    call.complete()
                    completed += 1
        assert len(collecting.result(timeout=LIMIT).scored) == 20


def test_batches_in_flight_per_service_follow_its_replicas(run: str) -> None:
    reward, reference, critic = Scorer(blocked=True), Scorer(blocked=True), Scorer(blocked=True)
    reward.processes = 3
    scoring = Scoring(ScoringServices(reward, reference, critic, 0.7), {})  # type: ignore[arg-type]
    for prompt in range(20):
        scoring.start([trajectory(run, prompt)])
    assert [len(scorer.calls) for scorer in (reward, reference, critic)] == [8, 4, 4]
    for call in (reward.calls[5], reward.calls[2], critic.calls[0]):
        call.complete()
    scoring.advance()
    assert [len(scorer.calls) for scorer in (reward, reference, critic)] == [10, 4, 5]
    assert first_tokens(reward) == [[prompt] for prompt in range(10)]
    assert scoring.batches_in_flight == 20


def test_without_a_critic_values_are_zero_and_not_requested(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt, response=3) for prompt in range(4)]
    stream.append(written)
    scorer = Scorer()
    step = collect(stream, scorer, written, critic=False)
    for item in step.scored:
        np.testing.assert_array_equal(item.values, np.zeros(3, np.float32))
        np.testing.assert_array_equal(item.reference_log_probs, -item.trajectory.response_ids.astype(np.float32))
    assert len(scorer.calls) == 2 * len(scorer.batches)


def test_the_part_scores_of_an_ensemble_stay_with_their_trajectory(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in (3, 1, 2)]
    stream.append(written)
    step = collect(stream, Scorer(), written, score_batch_size=2)
    assert [item.parts for item in step.scored] == [{"half": (prompt + 1) / 2} for prompt in (1, 2, 3)]


def test_the_fields_of_a_prompt_are_sent_with_its_trajectories(stream: RolloutStream, run: str) -> None:
    written = [trajectory(run, prompt) for prompt in (3, 1, 2)]
    stream.append(written)
    scorer = Scorer()
    collect(stream, scorer, written, score_batch_size=2, fields={1: '{"a":1}', 2: '{"a":2}', 3: '{"a":3}'})
    assert scorer.fields == [['{"a":3}'], ['{"a":1}', '{"a":2}']]


class FakeActor(Scorer):
    """Actor that scores each response token with minus twice its id. ``versions`` are those requested."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[int] = []

    def log_probs_of_version(self, batch: TokenBatch, temperature: float, policy_version: int) -> Any:
        self.versions.append(policy_version)
        return self._call("log_probs", lambda: -2 * responses(batch))


def test_the_actor_scores_each_response_if_the_kl_needs_it(run: str) -> None:
    scorer, actor = Scorer(), FakeActor()
    services = ScoringServices(scorer, scorer, scorer, 0.7, actor, scores_policy=True)  # type: ignore[arg-type]
    scoring = Scoring(services, {})
    scoring.start([trajectory(run, prompt, response=3) for prompt in range(2)])
    scoring.advance()
    assert len(scoring.scored) == 2
    for item in scoring.scored:
        assert item.policy_log_probs is not None
        np.testing.assert_array_equal(item.policy_log_probs, -2 * item.trajectory.response_ids.astype(np.float32))
    # The policy before the update of the step.
    assert actor.versions == [scoring.scored[0].trajectory.id.step - 1]


def test_the_actor_is_not_asked_for_the_log_probs_of_an_engine(run: str) -> None:
    scorer, actor = Scorer(), FakeActor()
    scoring = Scoring(ScoringServices(scorer, scorer, scorer, 0.7, actor), {})  # type: ignore[arg-type]
    scoring.start([trajectory(run, 0)])
    scoring.advance()
    assert scoring.scored[0].policy_log_probs is None
    assert not actor.calls


def without_log_probs(item: Trajectory, **changes: Any) -> Trajectory:
    segments = tuple(replace(segment, log_probs=np.zeros(0, np.float32)) for segment in item.segments)
    return replace(item, segments=segments, **changes)


def test_missing_log_probs_are_those_of_the_version_that_sampled(stream: RolloutStream, run: str) -> None:
    written = [without_log_probs(trajectory(run, 0, step=3, version=2)), trajectory(run, 1, step=3, version=2)]
    stream.append(written)
    scorer, actor = Scorer(), FakeActor()
    collector = Collector(stream, ScoringServices(scorer, scorer, scorer, 0.7, actor), 3)  # type: ignore[arg-type]
    try:
        step = collector.collect(replace(batch_of(written), policy_version=2), ended_generation(), ignore)
    finally:
        collector.reset()
    assert actor.versions == [2]
    response = written[0].response_ids.astype(np.float32)
    np.testing.assert_array_equal(step.scored[0].trajectory.log_probs, -2 * response)
    np.testing.assert_array_equal(step.scored[1].trajectory.log_probs, written[1].log_probs)


@pytest.mark.parametrize(
    ("version", "changes"),
    [(1, {}), (2, {"version_spans": (VersionSpan(1, b"", 1), VersionSpan(2, b"", 2))})],
    ids=["off-policy", "in flight"],
)
def test_log_probs_of_an_older_policy_are_never_those_of_the_current_one(
    version: int, changes: dict[str, Any], run: str
) -> None:
    scorer, actor = Scorer(), FakeActor()
    services = ScoringServices(scorer, scorer, scorer, 0.7, actor)  # type: ignore[arg-type]
    item = without_log_probs(trajectory(run, 0, step=3, version=version), generator="here:1", **changes)
    with pytest.raises(
        ConfigError,
        match=r"generator here:1 reports no log-probs of .*/3/0/0; expected those of policy version 1, .* max_off_policy_steps 0",
    ):
        services.sampled_log_probs([item])
    assert not actor.versions
