"""Answers of a scorer that are not those of a scorer: the first contact decides about the address, later ones are faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.contract.trajectory import Outcome
from quartet.errors import ConfigError, ServiceFailed
from tests.rewards.scorers.conftest import Build
from tests.rewards.scorers.faults import responses
from tests.rewards.scorers.http_server import DIALECTS, ScorerServer
from tests.rewards.scorers.reward_service import faulty_service
from tests.rewards.scorers.sources import FAST, section

BATCH = responses().batch
EXPECTED = responses().scores
STATUSES = [f"status {status}" for status in (301, 302, 303, 307, 308, 401, 403, 404, 405, 410)]
KINDS = ("openrlhf", "slime", "vllm-classify", "judge")
SLOW_BREAKER: dict[str, Any] = {"circuit_breaker_failures": 100}


def contacted(server: ScorerServer, fault: str, build: Build, kind: str = "openrlhf", **changes: Any) -> Any:
    """Return a source that has had an answer of its scorer, which then has a fault for every request."""
    source = build(section(kind, server.url, **{**SLOW_BREAKER, **changes}))
    np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)
    server.fault, server.everywhere = fault, True
    return source


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        # The kinds share the attempts, so each has one case. The two tests below have all other answers.
        ("status 307", "slime"),
        ("status 404", "vllm-classify"),
        ("page", "judge"),
        *((fault, "openrlhf") for fault in ("status 429", "nothing", "reset")),
    ],
)
def test_a_stray_answer_is_cured_by_a_further_attempt_and_counted(fault: str, kind: str, build: Build) -> None:
    with ScorerServer(DIALECTS[kind], faulty_requests=1).running() as server:
        cache = {"cache_entries": 0} if kind == "judge" else {}
        source = contacted(server, fault, build, kind, **cache)
        scores = source.score(BATCH)
    np.testing.assert_array_equal(scores.total, EXPECTED)
    assert scores.cured_faults == {"": 1}


def test_an_error_object_is_an_outcome_of_its_responses_only(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"], faulty_requests=1).running() as server:
        scores = contacted(server, "error object", build, "slime").score(BATCH)
    assert sorted(scores.all_outcomes) == sorted([Outcome.SCORER_ERROR] + [Outcome.OK] * 6)
    assert "overloaded" not in str(scores.details)


@pytest.mark.parametrize("fault", [*STATUSES, "page"])
def test_answers_that_stay_are_those_of_a_scorer_that_is_not_there(fault: str, build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"]).running() as server:
        source = contacted(server, fault, build)
        with pytest.raises(ServiceFailed, match=r"reward\.http: http://127.*(status \d+|page of HTML)") as failed:
            source.score(BATCH)
        assert "secret" not in str(failed.value)
        server.fault = ""
        np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)


@pytest.mark.parametrize("fault", [*STATUSES, "page"])
def test_the_first_contact_decides_about_the_address_after_all_attempts(fault: str, build: Build) -> None:
    with ScorerServer(DIALECTS["openrlhf"], fault, everywhere=True).running() as server:
        with pytest.raises(ConfigError, match=r"reward\.http: http://127.*(give the|correct the|check) "):
            build(section("openrlhf", server.url)).score(BATCH)
        assert len(server.requests) == FAST["max_attempts"]
    with ScorerServer(DIALECTS["openrlhf"], fault, everywhere=True, faulty_requests=1).running() as server:
        np.testing.assert_array_equal(build(section("openrlhf", server.url)).score(BATCH).total, EXPECTED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["status 307", "status 404"])
def test_a_process_that_restarts_after_an_update_knows_that_the_scorer_has_answered(
    fault: str, kind: str, build: Build
) -> None:
    later = replace(BATCH, updates=1)
    with ScorerServer(DIALECTS[kind], fault, everywhere=True).running() as server:
        source = build(section(kind, server.url, **SLOW_BREAKER))
        with pytest.raises(ServiceFailed, match=fault):
            source.score(later)
        server.fault = ""
        np.testing.assert_array_equal(source.score(later).total, EXPECTED)


def test_a_refused_request_is_an_answer_of_the_scorer(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"], "refusal", everywhere=True).running() as server:
        source = build(section("slime", server.url, **SLOW_BREAKER))
        assert set(source.score(BATCH).all_outcomes) == {Outcome.REFUSED}
        server.fault = "status 404"
        with pytest.raises(ServiceFailed, match="status 404"):
            source.score(BATCH)


def test_a_redirect_carries_neither_the_key_nor_a_response_to_another_host(build: Build, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-key-of-the-scorer")
    with (
        ScorerServer(DIALECTS["slime"]).running() as other,
        ScorerServer(DIALECTS["slime"], redirect_to=other.url, key="the-key-of-the-scorer").running() as server,
    ):
        source = contacted(server, "status 307", build, "slime", api_key_file=str(tmp_path / "key"))
        with pytest.raises(ServiceFailed, match=r"redirects \(status 307\), which is not followed"):
            source.score(BATCH)
    assert other.requests == []


def test_a_key_that_was_replaced_is_read_again(build: Build, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the-first-key-of-all")
    with ScorerServer(DIALECTS["openrlhf"], key="the-first-key-of-all").running() as server:
        source = contacted(server, "", build, api_key_file=str(file))
        server.key = "the-second-key-of-all"
        with pytest.raises(ServiceFailed, match=r"refuses access \(status 401\); check reward\.http\.api_key_file"):
            source.score(BATCH)
        file.write_text("the-second-key-of-all")
        scores = source.score(BATCH)
    np.testing.assert_array_equal(scores.total, EXPECTED)
    assert scores.cured_faults == {"": 1}


@pytest.mark.parametrize("fault", ["denied once", "unauthenticated once", "unimplemented once"])
def test_a_stray_refusal_of_a_reward_service_is_cured(fault: str, build: Build) -> None:
    with faulty_service(fault) as address:
        limits = {**FAST, "start_timeout_seconds": 20.0}
        scores = build({"source": "service", "service": {"address": address, **limits}}).score(BATCH)
    np.testing.assert_array_equal(scores.total, EXPECTED)
    assert scores.cured_faults == {"": 1}


def test_an_ensemble_counts_the_faults_of_each_part(build: Build) -> None:
    with ScorerServer(DIALECTS["slime"], "status 404", everywhere=True, faulty_requests=1).running() as server:
        parts = [{"name": name, **section("slime", server.url, max_concurrency=1)} for name in ("one", "two")]
        scores = build({"source": "ensemble", "parts": parts}).score(BATCH)
    assert sum(scores.cured_faults.values()) == 1
    assert set(scores.cured_faults) < {"one", "two"}
