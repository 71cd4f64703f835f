"""What cannot be scored: tried again by rule, set aside with its error, replaced by the next sample of its prompt."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import structlog

from quartet.buffer.connection import Redis
from quartet.buffer.rollouts import RolloutStream
from quartet.config import RecoveryConfig
from quartet.errors import (
    BufferFailed,
    Cancelled,
    ComputationFailed,
    FailedPrecondition,
    InvalidRequest,
    QuartetError,
    ServiceBusy,
    ServiceFailed,
    ServiceUnavailable,
    TooManySetAside,
    Unanswered,
)
from quartet.types import Role, Scores, TokenBatch, Trajectory, TrajectoryId
from services.orchestrator.collector import CollectedStep, Collector, Replacement
from services.orchestrator.scoring import Scoring, ScoringServices
from tests.buffer.samples import trajectory
from tests.orchestrator.fakes import Answer, responses

BACKOFF = 1e-6
Name = tuple[int, int]
"""Prompt and sample."""

SERVICES = ("score", "log_probs", "values")
ALWAYS = 1_000_000


def recovering(**changes: Any) -> RecoveryConfig:
    """With pauses too short to notice."""
    return RecoveryConfig(backoff=BACKOFF, **changes)


def sampled(run: str, prompt: int, sample: int = 0) -> Trajectory:
    """A trajectory by whose tokens a scorer knows its prompt and sample: a prompt begins with its number plus one."""
    return trajectory(run, prompt, sample=sample, response=3 + sample)


def names(batch: TokenBatch) -> list[Name]:
    first = [int(sequence[0]) - 1 for sequence in batch.sequences()]
    return list(zip(first, (batch.response_lengths - 3).tolist(), strict=True))


class PickyScorer:
    """Reward, reference and critic in one, that fail for some trajectories so many times."""

    role = Role.REFERENCE

    def __init__(self, error: QuartetError, held: bool = False, **failures: dict[Name, int]) -> None:
        """``failures`` by service and trajectory. With ``held`` the test answers the calls."""
        self._error, self._held = error, held
        self._failures = {service: dict(failures.get(service, {})) for service in SERVICES}
        self.asked: dict[str, list[list[Name]]] = {service: [] for service in SERVICES}
        self.calls: dict[str, list[Answer]] = {service: [] for service in SERVICES}
        self.fields: list[list[str]] = []

    def replicas(self) -> int:
        return 1

    def _call(self, service: str, batch: TokenBatch, compute: Callable[[], Any]) -> Any:
        asked, failures, fails = names(batch), self._failures[service], False
        self.asked[service].append(asked)
        for name in asked:
            if failures.get(name, 0) > 0:
                failures[name] -= 1
                fails = True
        call = Answer(compute)
        self.calls[service].append(call)
        if fails:
            # Known beforehand, seen when it is answered.
            call.answer = lambda error=None: Answer.answer(call, error or self._named(asked))  # type: ignore[method-assign]
        if not self._held:
            call.answer()
        return call

    def _named(self, asked: list[Name]) -> QuartetError:
        return type(self._error)(f"{self._error} of {len(asked)}")

    def score(self, batch: TokenBatch, fields: Sequence[str] = ()) -> Any:
        self.fields.append(list(fields))
        found = np.array([prompt + sample / 8 for prompt, sample in names(batch)], np.float32)
        return self._call("score", batch, lambda: Scores(found, {"half": found / 2}))

    def log_probs(self, batch: TokenBatch, temperature: float) -> Any:
        return self._call("log_probs", batch, lambda: -responses(batch))

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> Any:
        return self._call("values", batch, lambda: 2 * responses(batch))


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return request.node.name.replace(" ", "")


@pytest.fixture
def stream(redis_client: Redis, redis_url: str, run: str) -> RolloutStream:
    found = RolloutStream(redis_client, redis_url, run)
    found.reset()
    return found


class Actor:
    """Writes what is asked for into the stream, and remembers what it was."""

    def __init__(self, stream: RolloutStream, run: str, failure: Exception | None = None) -> None:
        self._stream, self._run, self._failure = stream, run, failure
        self.asked: list[tuple[set[int], int]] = []

    def generate(self, prompts: set[int], sample: int) -> Any:
        self.asked.append((prompts, sample))
        assert len(self.asked) < 20, self.asked
        generation = Answer(lambda: len(prompts))
        if self._failure is None:
            self._stream.append(sampled(self._run, prompt, sample) for prompt in sorted(prompts))
        generation.answer(self._failure)
        return generation


def collect(
    stream: RolloutStream,
    scorer: PickyScorer,
    written: list[Trajectory],
    actor: Actor,
    score_batch: int = 3,
    recovery: RecoveryConfig | None = None,
    progress: list[int] | None = None,
    fields: dict[int, str] | None = None,
) -> CollectedStep:
    stream.append(written)
    generation = Answer()
    generation.answer()
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    return Collector(stream, services, score_batch).collect(
        {item.id for item in written},
        0,
        generation,  # type: ignore[arg-type]
        (progress if progress is not None else []).append,
        fields,
        Replacement(recovery or recovering(), 0, actor.generate),
    )


def scored(step: CollectedStep) -> list[Name]:
    return [(item.trajectory.id.prompt, item.trajectory.id.sample) for item in step.scored]


def set_aside(step: CollectedStep) -> list[tuple[Name, int]]:
    return [((item.trajectory.id.prompt, item.trajectory.id.sample), item.attempts) for item in step.set_aside]


def assert_own_answers(step: CollectedStep) -> None:
    for item in step.scored:
        id, response = item.trajectory.id, item.trajectory.response_ids.astype(np.float32)
        assert item.score == id.prompt + id.sample / 8
        assert item.parts == {"half": item.score / 2}
        np.testing.assert_array_equal(item.reference_log_probs, -response)
        np.testing.assert_array_equal(item.values, 2 * response)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("error", [ComputationFailed("not finite"), ServiceFailed("raised"), InvalidRequest("no")])
def test_what_a_service_cannot_score_is_set_aside_and_the_next_sample_takes_its_place(
    service: str, error: QuartetError, stream: RolloutStream, run: str
) -> None:
    scorer = PickyScorer(error, **{service: {(4, 0): ALWAYS}})
    actor, progress = Actor(stream, run), list[int]()
    written = [sampled(run, prompt) for prompt in (8, 4, 1, 3, 2)]
    step = collect(stream, scorer, written, actor, progress=progress)
    assert scored(step) == [(1, 0), (2, 0), (3, 0), (4, 1), (8, 0)]
    assert_own_answers(step)
    assert set_aside(step) == [((4, 0), 3)]
    assert step.set_aside[0].error == f"{error} of 1", "the error of the attempt with this one alone"
    assert actor.asked == [({4}, 1)]
    whole, rest, again = [(8, 0), (4, 0), (1, 0)], [(3, 0), (2, 0)], [(4, 1)]
    alone = [[(8, 0)], [(4, 0)], [(1, 0)]]
    assert sorted(scorer.asked[service]) == sorted([whole, rest, whole, *alone, again])
    for other in set(SERVICES) - {service}:
        assert scorer.asked[other] == [whole, rest, again], "it has answered, so it is not asked again"
    assert progress[-1] == 5
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


@pytest.mark.parametrize("service", SERVICES)
def test_a_fault_that_passes_leaves_nothing_behind(service: str, stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), **{service: {(1, 0): 1}})
    actor = Actor(stream, run)
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(5)], actor)
    assert scored(step) == [(prompt, 0) for prompt in range(5)]
    assert_own_answers(step)
    assert step.set_aside == []
    assert actor.asked == []
    whole, rest = [(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0)]
    assert sorted(scorer.asked[service]) == sorted([whole, rest, whole]), "the same batch: a model gives the same bits"


def test_a_fault_that_passes_while_each_is_tried_alone_sets_nothing_aside(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ServiceFailed("no"), score={(1, 0): 3})
    recovery = recovering(scoring_attempts=4)
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run), recovery=recovery)
    assert scored(step) == [(0, 0), (1, 0), (2, 0)]
    assert_own_answers(step)
    assert step.set_aside == []
    whole = [(0, 0), (1, 0), (2, 0)]
    assert scorer.asked["score"] == [whole, whole, [(0, 0)], [(1, 0)], [(1, 0)], [(2, 0)]]


@pytest.mark.parametrize(
    ("attempts", "together", "alone", "counted"), [(1, 1, 1, 2), (2, 1, 1, 2), (3, 2, 1, 3), (6, 2, 4, 6)]
)
def test_attempts_are_counted_together_and_alone_and_nobody_is_set_aside_for_anothers_fault(
    attempts: int, together: int, alone: int, counted: int, stream: RolloutStream, run: str
) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    recovery = recovering(scoring_attempts=attempts)
    written = [sampled(run, prompt) for prompt in range(2)]
    step = collect(stream, scorer, written, Actor(stream, run), recovery=recovery)
    assert set_aside(step) == [((1, 0), counted)]
    whole = [(0, 0), (1, 0)]
    assert scorer.asked["score"] == [whole] * together + [[(0, 0)]] + [[(1, 0)]] * alone + [[(1, 1)]]


def test_a_batch_of_one_has_all_its_attempts(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run), score_batch=1)
    assert set_aside(step) == [((1, 0), 3)]
    assert scorer.asked["score"] == [[(0, 0)], [(1, 0)], [(1, 0)], [(1, 0)], [(1, 1)]]


def test_the_jth_of_a_prompt_that_is_set_aside_is_replaced_by_the_jth_sample_more(
    stream: RolloutStream, run: str
) -> None:
    poison = {(7, 0): ALWAYS, (7, 1): ALWAYS, (5, 1): ALWAYS, (7, 2): ALWAYS, (7, 4): ALWAYS}
    scorer, actor = PickyScorer(ComputationFailed("no"), score=poison), Actor(stream, run)
    written = [sampled(run, prompt, sample) for prompt, sample in itertools.product((9, 7, 5), range(2))]
    step = collect(stream, scorer, written, actor, recovery=recovering(max_set_aside=5))
    assert actor.asked == [({5, 7}, 2), ({7}, 3), ({7}, 4), ({7}, 5)]
    assert scored(step) == [(5, 0), (5, 2), (7, 3), (7, 5), (9, 0), (9, 1)], "as many of each prompt as before"
    assert [name for name, _ in set_aside(step)] == [(5, 1), (7, 0), (7, 1), (7, 2), (7, 4)]
    assert_own_answers(step)
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


@pytest.mark.parametrize("at_most", [0, 2])
def test_one_more_than_may_be_set_aside_ends_the_step_at_once_with_count_ids_and_error(
    at_most: int, stream: RolloutStream, run: str
) -> None:
    scorer = PickyScorer(ComputationFailed("ValueError"), score={(prompt, 0): ALWAYS for prompt in range(9)})
    actor = Actor(stream, run)
    with pytest.raises(TooManySetAside) as raised:
        collect(
            stream,
            scorer,
            [sampled(run, prompt) for prompt in range(9)],
            actor,
            score_batch=9,
            recovery=recovering(max_set_aside=at_most),
        )
    text = str(raised.value)
    assert text.startswith(
        f"step 1: {at_most + 1} of its trajectories could not be scored, recovery.max_set_aside is {at_most}"
    )
    assert "ValueError of 1" in text
    assert text.endswith(", ".join(f"{run}/1/{prompt}/0" for prompt in range(at_most + 1)))
    assert len(scorer.asked["score"]) == 2 + at_most + 1, "the others are not tried any more"
    assert actor.asked == []
    assert [item.trajectory.id.prompt for item in raised.value.set_aside] == list(range(at_most + 1))


def test_those_of_a_whole_step_count_together_also_where_replacements_fail(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(0, sample): ALWAYS for sample in range(10)})
    actor = Actor(stream, run)
    with pytest.raises(TooManySetAside, match="step 1: 5 of its trajectories"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], actor)
    assert actor.asked == [({0}, sample) for sample in (1, 2, 3, 4)]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    "error",
    [Unanswered("late"), ServiceUnavailable("gone"), ServiceBusy("full"), FailedPrecondition("no"), Cancelled("gone")],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_trajectorys_fault_is_raised_at_once(
    service: str, error: QuartetError, stream: RolloutStream, run: str
) -> None:
    scorer = PickyScorer(error, **{service: {(1, 0): 1}})
    with pytest.raises(type(error), match=str(error)):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert len(scorer.asked[service]) == 1


def test_a_service_that_is_gone_is_raised_while_an_earlier_batch_is_tried_again(run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), held=True, score={(0, 0): ALWAYS})
    scoring = scoring_of(scorer, [[0, 1], [2, 3]], run)
    scorer.calls["score"][0].answer()
    scoring.advance()
    scoring.advance()
    scorer.calls["score"][1].answer(ServiceUnavailable("gone"))
    with pytest.raises(ServiceUnavailable, match="gone"):
        scoring.advance()


def test_of_two_services_that_fail_the_first_is_named_and_the_trajectory_counts_once(
    stream: RolloutStream, run: str
) -> None:
    scorer = PickyScorer(ComputationFailed("no"), values={(1, 0): ALWAYS}, score={(1, 0): ALWAYS, (2, 0): ALWAYS})
    recovery = recovering(max_set_aside=2)
    written = [sampled(run, prompt) for prompt in range(3)]
    step = collect(stream, scorer, written, Actor(stream, run), recovery=recovery)
    assert set_aside(step) == [((1, 0), 3), ((2, 0), 3)]
    assert scored(step) == [(0, 0), (1, 1), (2, 1)]


def test_a_replacement_that_cannot_be_generated_ends_the_step(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    actor = Actor(stream, run, ServiceUnavailable("actor: gone"))
    with pytest.raises(ServiceUnavailable, match="actor: gone"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], actor)


def test_a_stranger_among_the_replacements_is_an_error(stream: RolloutStream, run: str) -> None:
    class Careless(Actor):
        def generate(self, prompts: set[int], sample: int) -> Any:
            return super().generate({prompt + 1 for prompt in prompts}, sample)

    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    with pytest.raises(BufferFailed, match="/1/2/1 of policy version 0 was not asked for"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Careless(stream, run))


def test_a_repeat_of_what_is_set_aside_is_freed_and_not_scored_again(stream: RolloutStream, run: str) -> None:
    class Repeating(Actor):
        def generate(self, prompts: set[int], sample: int) -> Any:
            self._stream.append([sampled(run, 1), sampled(run, 0)])
            return super().generate(prompts, sample)

    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Repeating(stream, run))
    assert scored(step) == [(0, 0), (1, 1), (2, 0)]
    assert scorer.asked["score"][-1] == [(1, 1)]
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_a_prompts_own_fields_go_with_every_attempt(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    fields = {prompt: f'{{"a":{prompt}}}' for prompt in range(3)}
    collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run), fields=fields)
    for asked, sent in zip(scorer.asked["score"], scorer.fields, strict=True):
        assert sent == [fields[prompt] for prompt, _ in asked]


class Clock:
    """Seconds, as the test would have them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Hurried(Clock):
    """Every look at it finds any pause over."""

    def __call__(self) -> float:
        self.now += 1e6
        return self.now


def scoring_of(
    scorer: PickyScorer,
    batches: list[list[int]],
    run: str,
    recovery: RecoveryConfig | None = None,
    clock: Clock | None = None,
) -> Scoring:
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    scoring = Scoring(services, {}, recovery or RecoveryConfig(), clock or Hurried())
    for batch in batches:
        scoring.begin([sampled(run, prompt) for prompt in batch])
    return scoring


def answer_in(order: Iterable[int], scorer: PickyScorer, scoring: Scoring) -> None:
    """Answers the first batches' calls in an order, with a look after each; then whatever is asked."""
    calls = [call for service in SERVICES for call in scorer.calls[service]]
    for place in order:
        calls[place].answer()
        scoring.advance()
    while scoring.under_way:
        for service in SERVICES:
            for call in scorer.calls[service]:
                if not call.done():
                    call.answer()
        scoring.advance()


def test_what_is_asked_and_set_aside_does_not_depend_on_the_order_of_the_answers(run: str) -> None:
    batches = [[0, 1], [2, 3], [4, 5]]
    seen = []
    for seed in range(40):
        scorer = PickyScorer(
            ComputationFailed("no"),
            held=True,
            score={(1, 0): ALWAYS, (3, 0): 1, (5, 0): ALWAYS},
            values={(0, 0): ALWAYS, (5, 0): 2},
        )
        scoring = scoring_of(scorer, batches, run)
        answer_in(np.random.default_rng(seed).permutation(9).tolist(), scorer, scoring)
        aside = sorted((str(item.trajectory.id), item.attempts, item.error) for item in scoring.set_aside)
        found = sorted(str(item.trajectory.id) for item in scoring.scored)
        seen.append((scorer.asked, aside, found))
    assert all(one == seen[0] for one in seen)
    asked, aside, found = seen[0]
    assert asked["score"] == [
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
    assert [id.split("/")[2] for id, _, _ in aside] == ["0", "1", "5"]
    assert [id.split("/")[2] for id in found] == ["2", "3", "4"]


def test_calls_of_a_batch_that_is_tried_again_are_let_go_with_the_rest(run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), held=True, score={(0, 0): ALWAYS})
    scoring = scoring_of(scorer, [[0, 1]], run)
    scorer.calls["score"][0].answer()
    scoring.advance()
    scoring.advance()
    assert len(scorer.calls["score"]) == 2
    scoring.cancel()
    assert scorer.calls["score"][1].cancelled
    assert scorer.calls["log_probs"][0].cancelled
    assert scorer.calls["values"][0].cancelled


def test_ids_of_replacements_are_derived_like_all_others(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run))
    assert step.scored[1].trajectory.id == TrajectoryId(run, 1, 1, 1)


@pytest.mark.parametrize("pauses", [[2.0, 4.0], [2.0, 4.0, 8.0], [2.0, 4.0, 8.0, 16.0, 30.0, 30.0]])
def test_attempts_come_after_pauses_that_double_and_other_services_go_on_meanwhile(
    pauses: list[float], run: str
) -> None:
    scorer, clock = PickyScorer(ComputationFailed("no"), held=True, score={(0, 0): ALWAYS}), Clock()
    recovery = RecoveryConfig(backoff=2.0, scoring_attempts=len(pauses) + 1)
    scoring = scoring_of(scorer, [[0], [1]], run, recovery, clock)
    for attempt, pause in enumerate(pauses):
        scorer.calls["score"][1 + attempt if attempt else 0].answer()
        scoring.advance()
        clock.now += pause * 0.99
        scoring.advance()
        assert scorer.asked["score"].count([(0, 0)]) == attempt + 1, "not before its time"
        clock.now += pause * 0.02
        scoring.advance()
        assert scorer.asked["score"].count([(0, 0)]) == attempt + 2
        # In the pause, and after it, what has been answered is taken in.
        for service in SERVICES:
            scorer.calls[service][1].answer()
            if service != "score":
                scorer.calls[service][0].answer()
        scoring.advance()
        assert [item.trajectory.id.prompt for item in scoring.scored] == [1]
    scorer.calls["score"][-1].answer()
    scoring.advance()
    assert [(item.trajectory.id.prompt, item.attempts) for item in scoring.set_aside] == [(0, len(pauses) + 1)]
    assert scoring.under_way == 0


def test_a_batch_that_was_answered_is_taken_in_while_one_before_it_pauses(run: str) -> None:
    scorer, clock = PickyScorer(ComputationFailed("no"), held=True, score={(0, 0): ALWAYS}), Clock()
    scoring = scoring_of(scorer, [[0, 1], [2, 3]], run, RecoveryConfig(), clock)
    scorer.calls["score"][0].answer()
    scoring.advance()
    for service in SERVICES:
        scorer.calls[service][1].answer()
    scoring.advance()
    assert [item.trajectory.id.prompt for item in scoring.scored] == [2, 3]
    assert scoring.under_way == 1


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_fails_for_every_one_of_a_batch_is_to_blame_and_nothing_is_set_aside(
    service: str, stream: RolloutStream, run: str
) -> None:
    failures = {(prompt, 0): ALWAYS for prompt in range(3)}
    scorer, actor = PickyScorer(ServiceFailed("broken"), **{service: failures}), Actor(stream, run)
    with pytest.raises(ServiceFailed, match=r"broken of 1; .*/1/0/0, .*/1/1/0, .*/1/2/0$"):
        collect(stream, scorer, [sampled(run, prompt) for prompt in range(6)], actor)
    assert actor.asked == []


def test_a_service_that_answers_for_one_of_a_batch_is_not_to_blame(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ServiceFailed("broken"), score={(0, 0): ALWAYS, (1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert [name for name, _ in set_aside(step)] == [(0, 0), (1, 0)]
    assert scored(step) == [(0, 1), (1, 1), (2, 0)]


def test_what_cannot_be_computed_for_every_one_of_a_batch_is_set_aside(stream: RolloutStream, run: str) -> None:
    scorer = PickyScorer(ComputationFailed("no"), score={(prompt, 0): ALWAYS for prompt in range(3)})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(3)], Actor(stream, run))
    assert [name for name, _ in set_aside(step)] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("others", [ServiceFailed, ComputationFailed])
def test_a_service_that_fails_more_often_than_may_be_set_aside_and_says_nothing_else_is_to_blame(
    others: type[QuartetError], stream: RolloutStream, run: str
) -> None:
    class Changing(PickyScorer):
        def _named(self, asked: list[Name]) -> QuartetError:
            return (others if asked == [(1, 0)] else ServiceFailed)("broken")

    scorer = Changing(ServiceFailed("broken"), score={(prompt, 0): ALWAYS for prompt in range(9)})
    written = [sampled(run, prompt) for prompt in range(9)]
    with pytest.raises(ServiceFailed if others is ServiceFailed else TooManySetAside, match="step 1: 3 of its"):
        collect(stream, scorer, written, Actor(stream, run), score_batch=9, recovery=recovering(max_set_aside=2))


def test_the_log_does_not_quote_what_a_function_quotes_of_a_response(
    stream: RolloutStream, run: str, capture: list[dict[str, Any]]
) -> None:
    scorer = PickyScorer(ComputationFailed("ValueError: cannot read 'my secret'"), score={(1, 0): ALWAYS})
    step = collect(stream, scorer, [sampled(run, prompt) for prompt in range(2)], Actor(stream, run))
    [line] = [line for line in capture if line["event"] == "trajectory set aside"]
    assert line["error"] == "ComputationFailed"
    assert line["id"] == f"{run}/1/1/0"
    assert "secret" not in str(capture)
    assert "my secret" in step.set_aside[0].error


@pytest.fixture
def capture() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines
