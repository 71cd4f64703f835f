"""The judge: its request, the strict reading of its answer, the cache, and the cost."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from quartet.config.rewards import JudgeConfig
from quartet.contract.trajectory import Outcome, TokenBatch
from quartet.rewards.attempts import RequestFailed
from quartet.rewards.judge import Judge, JudgeCache
from tests.rewards.scorers.conftest import Build
from tests.rewards.scorers.faults import responses
from tests.rewards.scorers.http_server import DIALECTS, ScorerServer
from tests.rewards.scorers.sources import section

BATCH = responses().batch
EXPECTED = responses().scores


def judgement(content: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop", **choice}]}


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setattr("quartet.rewards.judge.HttpConnection", lambda config, key: None)
    monkeypatch.setattr("quartet.rewards.judge.Attempts", lambda config, name: None)
    return Judge(JudgeConfig(url="http://127.0.0.1:9", model="m", rubric="r"), "reward.judge", None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "choices: None, expected a list of 1"),
        ({"choices": []}, "choices: a list of 0"),
        ({"choices": [1]}, "expected a list of 1"),
        ({"choices": [{"message": "no"}]}, "message is a string of 2 characters, expected an object"),
        (judgement(None), "content is None, expected a text"),
        (judgement(7), "content is 7, expected a text"),
        (judgement("seven"), "the judgement is not JSON"),
        (judgement('{"reason": "r", "score": NaN}'), "the judgement is not JSON"),
        (judgement('{"reason": "r", "score": 1e999}'), "the score is inf, expected a number from 0 to 10"),
        (judgement('{"reason": "r", "score": 11}'), "the score is 11, expected a number from 0 to 10"),
        (judgement('{"reason": "r", "score": -1}'), "the score is -1"),
        (judgement('{"reason": "r", "score": true}'), "the score is True"),
        (judgement('{"reason": "r", "score": "7"}'), "the score is a string of 1 characters"),
        (judgement('{"score": 7}'), "the judgement is a dict of 1, expected an object with reason and score"),
        (judgement('{"reason": "r", "score": 7, "more": 1}'), "the judgement is a dict of 3"),
        (judgement('{"reason": 3, "score": 7}'), "the reason is 3, expected a text"),
        (judgement('[{"reason": "r", "score": 7}]'), "the judgement is a list of 1"),
        (judgement('{"reason": "r", "sc', finish_reason="length"), r"is cut off; raise reward\.judge\.max_tokens"),
    ],
)
def test_an_answer_that_is_no_judgement_is_no_score(answer: Any, reason: str, judge: Judge) -> None:
    with pytest.raises(ValueError, match=reason):
        judge._read(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": None, "refusal": "I cannot"}}]},
        judgement('{"reason": "r", "score": 7}', finish_reason="content_filter"),
    ],
)
def test_a_judge_that_declines_has_refused(answer: Any, judge: Judge) -> None:
    with pytest.raises(RequestFailed) as raised:
        judge._read(answer)
    assert raised.value.outcome is Outcome.REFUSED


def test_a_valid_judgement_is_a_score(judge: Judge) -> None:
    assert judge._read(judgement('{"reason": "good", "score": 7.5}')) == 7.5


def test_the_request_has_rubric_texts_and_schema(build: Build) -> None:
    template = "Task {task}\nPrompt:\n{prompt}\nResponse:\n{response}"
    with ScorerServer(DIALECTS["judge"]).running() as server:
        build(section("judge", server.url, template=template)).score(BATCH, ['{"task": {"a": 1}}'] * 7)
    body = next(body for _, body in server.requests if "w21 w9" in body["messages"][1]["content"])
    assert body["model"] == "judge"
    assert (body["temperature"], body["seed"]) == (0.0, 0)
    assert body["messages"][0]["content"].startswith("Count the words.\n")
    assert body["messages"][1]["content"] == 'Task {"a": 1}\nPrompt:\nw31 w31\nResponse:\nw21 w9'
    schema = body["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["required"] == ["reason", "score"]


def test_text_of_a_field_inserts_nothing_into_the_template(build: Build) -> None:
    template = "{task}\nResponse:\n{response}"
    with ScorerServer(DIALECTS["judge"]).running() as server:
        build(section("judge", server.url, template=template)).score(BATCH, ['{"task": "{response} {prompt}"}'] * 7)
    assert all(body["messages"][1]["content"].startswith("{response} {prompt}\n") for _, body in server.requests)


def test_a_field_that_the_line_lacks_is_a_failure_of_its_response(build: Build) -> None:
    fields = ['{"task": "t"}'] * 6 + ["{}"]
    with ScorerServer(DIALECTS["judge"]).running() as server:
        scores = build(section("judge", server.url, template="{task}\nResponse:\n{response}")).score(BATCH, fields)
    assert scores.all_outcomes == (Outcome.OK,) * 6 + (Outcome.SCORER_ERROR,)
    assert scores.details[6] == "reward.judge.template: the prompt's line has no field task"


def test_a_response_is_judged_once_also_after_a_restart(build: Build, tmp_path: Path) -> None:
    with ScorerServer(DIALECTS["judge"]).running() as server:
        for _ in range(2):
            source = build(section("judge", server.url))
            for _ in range(2):
                np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)
            source.close()
        assert len(server.requests) == 7
        assert (tmp_path / "run/reward.judge.sqlite3").exists()
        build(section("judge", server.url, rubric="Another.")).score(BATCH)
        assert len(server.requests) == 14, "another rubric needs other scores"


def test_equal_responses_in_one_batch_are_judged_once(build: Build) -> None:
    twice = TokenBatch(
        np.concatenate([BATCH.token_ids, BATCH.token_ids]),
        np.concatenate([BATCH.prompt_lengths, BATCH.prompt_lengths]),
        np.concatenate([BATCH.response_lengths, BATCH.response_lengths]),
    )
    for entries in (0, 100):
        with ScorerServer(DIALECTS["judge"], delay=0.05).running() as server:
            scores = build(section("judge", server.url, cache_entries=entries)).score(twice)
            np.testing.assert_array_equal(scores.total, np.concatenate([EXPECTED, EXPECTED]))
            assert len(server.requests) == 7


def test_a_failure_is_not_cached(build: Build) -> None:
    server = ScorerServer(DIALECTS["judge"], "nan")
    with server.running():
        source = build(section("judge", server.url))
        assert source.score(BATCH).outcomes.count(Outcome.SCORER_ERROR) == 2
        server.fault = ""
        np.testing.assert_array_equal(source.score(BATCH).total, EXPECTED)


def test_the_log_has_tokens_and_cost(build: Build) -> None:
    with ScorerServer(DIALECTS["judge"]).running() as server, structlog.testing.capture_logs() as lines:
        source = build(section("judge", server.url, input_price=2.0, output_price=10.0))
        source.score(BATCH)
        source.score(BATCH)
        source.close()
    [line] = [line for line in lines if line["event"] == "judge cost"]
    assert (line["requests"], line["from_cache"]) == (7, 7)
    assert (line["input_tokens"], line["output_tokens"]) == (700, 140)
    assert line["cost"] == round((700 * 2 + 140 * 10) / 1e6, 6)


def test_the_cache_keeps_the_newest_scores(tmp_path: Path) -> None:
    cache = JudgeCache(tmp_path / "cache", 3, 0.0, 1.0)
    for index in range(5):
        cache.put(str(index), index / 4)
    cache.put("4", 0.1)
    assert [cache.get(str(index)) for index in range(5)] == [None, None, 0.5, 0.75, 1.0]
    cache.close()
    again = JudgeCache(tmp_path / "cache", 3, 0.0, 1.0)
    assert again.get("4") == 1.0
    again.close()


def _make_unusable(fault: str, path: Path) -> Path:
    """Return a path of a cache with the fault."""
    if fault == "no folder":
        return path / "cache"
    if fault == "a folder":
        path.mkdir()
    elif fault == "damaged":
        path.write_bytes(b"no database at all" * 99)
    else:
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE scores (number INTEGER)")
        database.close()
    return path


@pytest.mark.parametrize("fault", ["no folder", "a folder", "damaged", "another table"])
def test_a_cache_that_cannot_be_used_is_in_memory_with_one_warning(fault: str, tmp_path: Path) -> None:
    path = _make_unusable(fault, tmp_path / "cache")
    with structlog.testing.capture_logs() as lines:
        cache = JudgeCache(path, 3, 0.0, 1.0)
        assert cache.get("a") is None
        cache.put("a", 0.5)
        assert cache.get("a") == 0.5
        cache.close()
    [line] = lines
    assert line["log_level"] == "warning"
    assert line["event"].startswith("judge cache is only in memory")
    assert line["path"] == str(path)


@pytest.mark.parametrize("fault", ["locked", "full"])
def test_a_cache_that_cannot_be_written_is_in_memory(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache, other = JudgeCache(path, 3, 0.0, 1.0), sqlite3.connect(path, isolation_level=None)
    cache._database.execute("PRAGMA busy_timeout = 0")
    if fault == "locked":
        other.execute("BEGIN EXCLUSIVE")
    else:
        cache._database.execute("PRAGMA max_page_count = 1")
    key = "a" * 10_000
    with structlog.testing.capture_logs() as lines:
        cache.put(key, 0.5)
    assert [line["reason"] for line in lines] == [
        "database is locked" if fault == "locked" else "database or disk is full"
    ]
    assert cache.get(key) == 0.5
    cache.close()
    other.close()


@pytest.mark.parametrize("stored", [None, "high", b"0.5", -0.1, 1.1, float("inf")])
def test_a_stored_value_that_is_not_a_score_is_judged_again(stored: Any, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    JudgeCache(path, 3, 0.0, 1.0).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("INSERT INTO scores (key, score) VALUES ('a', ?)", (stored,))
    other.close()
    cache = JudgeCache(path, 3, 0.0, 1.0)
    assert cache.get("a") is None
    cache.put("a", 0.5)
    assert cache.get("a") == 0.5
    cache.close()


def test_an_unusable_cache_costs_no_score(build: Build, tmp_path: Path) -> None:
    (tmp_path / "run/reward.judge.sqlite3").mkdir()
    with ScorerServer(DIALECTS["judge"]).running() as server:
        np.testing.assert_array_equal(build(section("judge", server.url)).score(BATCH).total, EXPECTED)
