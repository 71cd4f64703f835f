"""Verifier of mathematical answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from quartet.verifiers import math, math_comparison
from quartet.verifiers.errors import ComputationTooLarge, InvalidField
from quartet.verifiers.math import final_answer, given_answer
from tests.waiting import LIMIT


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        (7, "3 + 4 = 7"),
        ("1/2", r"\boxed{0.5}"),
        ("1/2", r"so \boxed{\frac{1}{2}}."),
        (r"\frac{1}{2}", "1/2"),
        ("50%", "the answer is 0.5"),
        (0.5, "the answer is 50%"),
        ("1,000", "It is 1000."),
        (1000, "1,000 apples"),
        (-3, "x = -3"),
        (1e-7, "0.0000001"),
        ("1/3", "0.333333"),
        ("x^2+1", r"$\boxed{1+x^2}$"),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}"),
        ("2^{10}", "1024"),
        ("(1,2)", r"\boxed{(1,2)}"),
        (3, "The answer is 2. No, the answer is 3"),
        (2, r"\boxed{2} because 5"),
    ],
)
def test_equal_answers_score_1(answer: object, response: str) -> None:
    assert final_answer("", response, {"answer": answer}) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        (3, "nothing"),
        (3, ""),
        (3, r"\boxed{4} is not 3"),
        (2, r"\boxed{1} \boxed{2} \boxed{3}"),
        (2, r"\boxed{1 or 2 or 3}"),
        (2, "1 2 3"),
        ("1/3", "0.33"),
        (42, "4 2"),
        (3, r"\boxed{3"),
        (3, "(" * 4000),
        (3, r"\frac{" * 700),
        (3, "$" * 4000),
    ],
)
def test_other_answers_score_0(answer: object, response: str) -> None:
    assert final_answer("", response, {"answer": answer}) == 0.0


def test_only_the_end_of_a_long_response_is_read() -> None:
    assert final_answer("", "9 " * 10**6 + "so 7", {"answer": 7}) == 1.0
    assert final_answer("", r"\boxed{7}" + " " * 5000, {"answer": 7}) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{10^{100000000}}",
        r"\boxed{1000000!}",
        r"\boxed{" + "(" * 500 + "3" + ")" * 500 + "}",
        r"\boxed{" + r"\sqrt{" * 200 + "4" + "}" * 201,
        r"\boxed{" + "9" * 3000 + "^{99}}",
    ],
)
def test_a_final_answer_beyond_the_bounds_scores_0_at_once(response: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("math_verify.verify", pytest.fail)
    # They would limit the process of the tests.
    for limit in ("limit_memory", "limit_cpu"):
        monkeypatch.setattr(math_comparison, limit, lambda *_: None)
    assert math_comparison.compare("3", response, 6, 60.0) is False
    assert final_answer("", response, {"answer": 3}) == 0.0


@pytest.mark.parametrize(
    "response", [r"9^{9^{9^9}} mod 5 is \boxed{4}", r"\boxed{4} and not \(10^{100000000}\)", r"\boxed{2^{2}}"]
)
def test_large_numbers_outside_of_the_box_do_not_count(response: str) -> None:
    assert final_answer("", response, {"answer": 4}) == 1.0


def test_a_response_that_takes_too_long_scores_0_in_every_thread() -> None:
    response = r"\boxed{(9^{999999})^{99999}}"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(final_answer, "", response, {"answer": 3}, seconds=0.5).result() == 0.0
    assert final_answer("", "3", {"answer": 3}) == 1.0


def test_an_answer_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "WALL_FACTOR", LIMIT)
    with pytest.raises(ComputationTooLarge):
        final_answer("", "3", {"answer": "(9^{999999})^{99999}"}, seconds=0.2)


@pytest.mark.parametrize("fields", [{}, {"answer": ""}, {"answer": [1]}, {"answer": True}, {"answer": "?"}])
def test_a_bad_answer_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match="answer"):
        final_answer("", "1", fields)


@pytest.mark.parametrize(
    ("responses", "text"),
    [
        ([r"so \boxed{\frac{1}{2}}", "0.5", "the answer is 50%", r"1 or \boxed{2^{-1}}"], "1/2"),
        (["3 + 4 = 7", r"\boxed{7.0}", "the answer is 7"], "7"),
        (["1,000", "1000"], "1000"),
        ([r"\boxed{1+x^2}", r"$\boxed{x^2+1}$"], "x**2 + 1"),
        ([r"\boxed{\sqrt{2}}", r"\boxed{2^{1/2}}", "1.4142136"], "707107/500000"),
        (["12345678901234567890"], "12345678901234567890"),
    ],
)
def test_equal_answers_have_one_text(responses: list[str], text: str) -> None:
    assert [given_answer("", response, {}) for response in responses] == [text] * len(responses)


def test_different_answers_have_different_texts() -> None:
    responses = ["7", "8", "-7", r"\boxed{x}", r"\boxed{y}", r"\boxed{\text{B}}"]
    assert len({given_answer("", response, {}) for response in responses}) == len(responses)
    assert given_answer("", "0.12", {}, decimals=1) == given_answer("", "0.1", {}) != given_answer("", "0.12", {})


@pytest.mark.parametrize("response", ["", "no number", r"\boxed{9^{9^{9^9}}}"])
def test_a_response_without_an_answer_has_none(response: str) -> None:
    assert given_answer("", response, {}) is None


def test_an_answer_that_takes_too_long_to_compute_is_none() -> None:
    assert given_answer("", r"\boxed{(9^{999999})^{99999}}", {}, seconds=0.5) is None
    assert given_answer("", "3", {}) == "3"


def test_only_the_end_of_a_long_response_is_searched_for_the_answer() -> None:
    assert given_answer("", "the answer is 4" + " " * 50, {}, max_characters=20) is None
