"""Faults of every source: the responses that they concern get no score, and no other response notices.

The scores that reach the update are those of the responses without the fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.config.deployment import RecoveryConfig
from quartet.contract.trajectory import FinishReason, Outcome, Scores, TokenBatch, Trajectory, TrajectoryId
from quartet.errors import ComputationFailed, QuartetError, ServiceFailed, ServiceUnavailable
from quartet.rewards.reward_source import RewardSource
from quartet.services.orchestrator.rollout.scoring import Scoring, ScoringServices
from tests.rewards.scorers.conftest import Build
from tests.rewards.scorers.faults import FAULTS, HANG_TIMEOUT, MARK, TIMEOUT, responses
from tests.rewards.scorers.function_faults import FUNCTIONS
from tests.rewards.scorers.http_server import DIALECTS, ScorerServer
from tests.rewards.scorers.reward_service import faulty_service
from tests.rewards.scorers.sources import FAST, HTTP, section
from tests.services.orchestrator.fake_services import FakeCall
from tests.services.orchestrator.rollout.failing_services import FailingScorer

CASES = (
    # What ends the wait differs: the HTTP client, the deadline of the call, and the end of the process.
    *(("openrlhf", "hang"), ("service", "hang"), ("function", "hang")),
    # Faults of connections and bodies, which the HTTP client finds for all dialects and the judge.
    *(("slime", "error"), ("vllm-classify", "overloaded"), ("nemo-gym", "cut"), ("openrlhf", "reset")),
    *(("sglang-embeddings", "oversized"), ("slime", "broken"), ("judge", "empty")),
    # Answers that each source reads in its own way.
    *(("sglang-embeddings", "refusal"), ("nemo-gym", "too few"), ("vllm-classify", "null"), ("judge", "too many")),
    *(("service", "nan"), ("function", "infinity"), ("trl", "boolean"), ("verl", "string")),
)
"""Sources and faults: each source and each fault at least once."""
SOURCES = (*HTTP, "judge", "service", "function", "trl", "verl")


@contextmanager
def faulty(kind: str, fault: str, build: Build, folder: Path) -> Iterator[RewardSource]:
    """Yield a source whose scorer has a fault for marked responses."""
    timeout = HANG_TIMEOUT if fault == "hang" else TIMEOUT
    with ExitStack() as stack:
        if kind == "service":
            address = stack.enter_context(faulty_service(fault))
            limits = {**FAST, "timeout_seconds": timeout, "start_timeout_seconds": 20.0}
            yield build({"source": "service", "service": {"address": address, **limits}})
        elif kind in ("function", "trl", "verl"):
            (folder / "scorers.py").write_text(FUNCTIONS)
            signature = "quartet" if kind == "function" else kind
            yield build(
                {
                    "source": "function",
                    "function": f"scorers:{signature}",
                    "signature": signature,
                    "arguments": {"fault": fault},
                    "timeout_seconds": timeout,
                }
            )
        else:
            server = stack.enter_context(ScorerServer(DIALECTS[kind], fault).running())
            yield build(section(kind, server.url, timeout_seconds=timeout))


FIELDS = ['{"ground_truth": "x", "label": "y"}'] * 7


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_a_fault_is_an_outcome_of_the_responses_that_it_concerns(
    kind: str, fault: str, build: Build, tmp_path: Path
) -> None:
    assert {fault for _, fault in CASES} == set(FAULTS)
    sequences = responses()
    with faulty(kind, fault, build, tmp_path) as source:
        scores = scored_by(source, sequences.batch)
        expected = FAULTS[fault]
        outcomes = [expected if marked else Outcome.OK for marked in sequences.marked]
        assert list(scores.all_outcomes) == outcomes, scores.details
        assert np.isnan(scores.total[sequences.marked]).all(), "a failure became a number"
        np.testing.assert_array_equal(scores.total[~sequences.marked], sequences.scores[~sequences.marked])
        for detail, marked in zip(scores.all_details, sequences.marked, strict=True):
            assert bool(detail) == marked
            assert MARK not in detail.split()
            assert "secret" not in detail


def scored_by(source: RewardSource, batch: TokenBatch) -> Scores:
    """Return the scores of a batch. If it fails as a whole, its sequences are scored one by one, as the orchestrator does."""
    try:
        return source.score(batch, FIELDS[: len(batch)])
    except (ComputationFailed, ServiceFailed) as error:
        if len(batch) == 1:
            return Scores(np.array([np.nan], np.float32), {}, (Outcome.SCORER_ERROR,), (str(error),))
        singles = [scored_by(source, one) for one in single_batches(batch)]
        return Scores(
            np.concatenate([each.total for each in singles]),
            outcomes=tuple(outcome for each in singles for outcome in each.all_outcomes),
            details=tuple(detail for each in singles for detail in each.all_details),
        )


def single_batches(batch: TokenBatch) -> list[TokenBatch]:
    return [
        TokenBatch(ids, np.array([prompt], np.int32), np.array([len(ids) - prompt], np.int32))
        for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)
    ]


class LocalReward:
    """Client of a reward source in this process."""

    def __init__(self, source: RewardSource) -> None:
        self._source = source

    def replicas(self) -> int:
        return 1

    def start(self, begin: Callable[[Any], Any]) -> Any:
        return begin(self)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), weights: Any = None) -> Any:
        try:
            scores = self._source.score(batch, fields)
        except QuartetError as error:
            failed = FakeCall()
            failed.complete(error)
            return failed
        call = FakeCall(lambda: scores)
        call.complete()
        return call


def trajectories() -> list[Trajectory]:
    sequences = responses()
    return [
        Trajectory.of_response(
            TrajectoryId("run", 1, index, 0), 0, ids[:prompt], ids[prompt:], np.zeros(0, np.float32), FinishReason.EOS
        )
        for index, (ids, prompt) in enumerate(
            zip(sequences.batch.sequences(), sequences.batch.prompt_lengths, strict=True)
        )
    ]


def trained_scores(source: RewardSource, recovery: RecoveryConfig) -> tuple[np.ndarray, list[Outcome]]:
    """Return the scores that the update gets, and the outcomes of the failed trajectories, as the orchestrator has them."""
    fake = FailingScorer(QuartetError("unused"))
    services = ScoringServices(LocalReward(source), fake, None, 1.0)  # type: ignore[arg-type]
    scoring = Scoring(services, dict.fromkeys(range(7), FIELDS[0]), recovery)
    items = trajectories()
    scoring.start(items[:4])
    scoring.start(items[4:])
    deadline = time.monotonic() + 60
    while scoring.batches_in_flight:
        scoring.advance()
        assert time.monotonic() < deadline
    scored = sorted(scoring.scored, key=lambda item: item.trajectory.id)
    return np.array([item.score for item in scored], np.float32), [item.outcome for item in scoring.failed_trajectories]


@pytest.mark.parametrize(("kind", "fault"), [(HTTP[0], "error"), ("service", "nan"), ("function", "refusal")])
def test_the_statistics_of_a_step_are_those_of_the_responses_without_a_fault(
    kind: str, fault: str, build: Build, tmp_path: Path
) -> None:
    sequences = responses()
    recovery = RecoveryConfig(backoff_seconds=1e-6, max_scoring_attempts=2)
    with faulty(kind, fault, build, tmp_path) as source:
        scores, failed = trained_scores(source, recovery)
    expected = sequences.scores[~sequences.marked]
    np.testing.assert_array_equal(scores, expected)
    assert (scores.astype(np.float64).mean(), scores.astype(np.float64).std()) == (
        expected.astype(np.float64).mean(),
        expected.astype(np.float64).std(),
    )
    assert failed == [FAULTS[fault]] * 2


@pytest.mark.parametrize("kind", SOURCES)
def test_without_a_fault_every_response_has_its_score(kind: str, build: Build, tmp_path: Path) -> None:
    sequences = responses()
    with faulty(kind, "", build, tmp_path) as source:
        scores = source.score(sequences.batch, FIELDS)
        assert scores.outcomes == ()
        np.testing.assert_array_equal(scores.total, sequences.scores)


@pytest.mark.parametrize(
    ("kind", "fault"),
    # The sources share the attempts, so each has one fault.
    [*((kind, "error") for kind in (*HTTP, "judge")), *((HTTP[0], fault) for fault in ("overloaded", "cut", "reset"))],
)
def test_a_transient_fault_is_retried_and_changes_nothing(kind: str, fault: str, build: Build) -> None:
    sequences = responses()
    server = ScorerServer(DIALECTS[kind], fault, faulty_requests=1)
    with server.running():
        scores = build(section(kind, server.url, max_attempts=3)).score(sequences.batch, FIELDS)
    assert scores.outcomes == ()
    np.testing.assert_array_equal(scores.total, sequences.scores)


def test_the_parts_of_an_ensemble_keep_their_curves(build: Build, tmp_path: Path) -> None:
    sequences = responses()
    (tmp_path / "scorers.py").write_text(FUNCTIONS)
    function = {"name": "words", "weight": 0.5, "source": "function", "function": "scorers:quartet"}
    with (
        ScorerServer(DIALECTS["openrlhf"], "nan").running() as remote,
        ScorerServer(DIALECTS["judge"]).running() as judge,
    ):
        source = build(
            {
                "source": "ensemble",
                "parts": [
                    function,
                    {"name": "remote", "weight": 2.0, **section("openrlhf", remote.url)},
                    {"name": "judge", "weight": -1.0, **section("judge", judge.url)},
                ],
            }
        )
        scores = source.score(sequences.batch, FIELDS)
    ok = ~sequences.marked
    assert [outcome is Outcome.OK for outcome in scores.all_outcomes] == ok.tolist()
    np.testing.assert_array_equal(scores.total[ok], 1.5 * sequences.scores[ok])
    np.testing.assert_array_equal(scores.parts["words"], sequences.scores)
    np.testing.assert_array_equal(scores.parts["judge"], sequences.scores)
    np.testing.assert_array_equal(np.isnan(scores.parts["remote"]), sequences.marked)


def test_a_reward_service_that_never_answers_is_named_with_its_key(build: Build) -> None:
    service = {"address": "127.0.0.1:1", "start_timeout_seconds": 0.2}
    message = r"no Quartet service responded within 0\.2 s; start it, or correct reward\.service\.address$"
    with pytest.raises(ServiceUnavailable, match=message):
        build({"source": "service", "service": service})
