"""Verifiers of text: exact match, regular expressions, tags and sections."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quartet.errors import ConfigError
from quartet.verifiers.errors import InvalidField, VerifierTimeout
from quartet.verifiers.text import exact_match, given_answer, regular_expression, required_sections, required_tags


@pytest.mark.parametrize(
    ("answer", "response", "settings", "score"),
    [
        ("Paris", " Paris\n", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"ignore_case": True}, 1.0),
        ("New York", "New \n York", {}, 1.0),
        (["4", 5], "5", {}, 1.0),
        (["4", "5"], "45", {}, 0.0),
        (0.5, "0.5", {}, 1.0),
    ],
)
def test_exact_match(answer: object, response: str, settings: dict[str, Any], score: float) -> None:
    assert exact_match("", response, {"answer": answer}, **settings) == score


@pytest.mark.parametrize("answer", [None, "", [], [""], True, {}, ["a", None]])
def test_a_bad_answer_is_an_error(answer: object) -> None:
    with pytest.raises(InvalidField, match="answer"):
        exact_match("", "", {"answer": answer})


def test_a_regular_expression_matches_somewhere_or_the_whole_response() -> None:
    assert regular_expression("", "it is 42.", {"pattern": r"\d+"}) == 1.0
    assert regular_expression("", "it is 42.", {}, pattern=r"\d+", whole=True) == 0.0
    assert regular_expression("", "42", {"number": r"\d+"}, pattern_field="number", whole=True) == 1.0
    assert regular_expression("", "xxxxx4", {}, pattern=r"\d", max_characters=5) == 0.0


@pytest.mark.parametrize("fields", [{}, {"pattern": 3}, {"pattern": "("}])
def test_a_bad_pattern_is_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="pattern"):
        regular_expression("", "x", fields)


def test_a_pattern_that_never_ends_is_a_timeout_in_every_thread() -> None:
    def search() -> None:
        assert threading.current_thread() is not threading.main_thread()
        regular_expression("", "a" * 60 + "b", {"pattern": "(a+)+$"}, seconds=0.3)

    with ThreadPoolExecutor(1) as pool, pytest.raises(VerifierTimeout, match=r"longer than 0.3 s") as failure:
        pool.submit(search).result()
    assert failure.value.outcome == "timeout"
    assert regular_expression("", "a", {"pattern": "a"}) == 1.0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_required_tags(response: str, score: float) -> None:
    assert required_tags("", response, {}) == score


def test_text_around_tags_may_be_allowed() -> None:
    assert required_tags("", "well <a>1</a> then", {}, tags=["a"], only=False) == 1.0


@pytest.mark.parametrize("tags", [[], "think", [3], [""]])
def test_bad_tags_are_an_error(tags: Any) -> None:
    with pytest.raises(InvalidField, match="tags"):
        required_tags("", "", {}, tags=tags)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("# A\ntext\n# B\n text\n", 1.0),
        ("intro\n# A\ntext\n\n# B\ntext", 1.0),
        ("# A\n# B\ntext", 0.0),
        ("# B\ntext\n# A\ntext", 0.0),
        ("# A\ntext\n# B\ntext\n# A\n", 0.0),
        ("# A\ntext", 0.0),
    ],
)
def test_required_sections(response: str, score: float) -> None:
    assert required_sections("", response, {}, headings=["# A", "# B"]) == score
    assert required_sections("", response, {"headings": ["# A", "# B"]}) == score


def test_sections_without_headings_are_an_error() -> None:
    with pytest.raises(InvalidField, match="headings"):
        required_sections("", "", {})


@pytest.mark.parametrize(("module", "package"), [("math", "math_verify"), ("json_schema", "jsonschema")])
def test_a_missing_package_is_reported_when_a_config_is_checked(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = importlib.import_module(f"quartet.verifiers.{module}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"the package {package} is not installed.*quartet-rlhf\[verifiers\]"):
        importlib.reload(imported)


def test_responses_that_match_the_same_answers_have_one_text() -> None:
    assert given_answer("", " New \n York", {}) == given_answer("", "New York", {}) == "New York"
    assert given_answer("", "PARIS", {}, ignore_case=True) == given_answer("", "Paris", {}, ignore_case=True)
    assert given_answer("", "PARIS", {}) != given_answer("", "Paris", {})
    assert given_answer("", " \n", {}) is None
