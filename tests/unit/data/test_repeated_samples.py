"""pass@k and maj@k, compared with values computed by hand and with an enumeration of all choices."""

from __future__ import annotations

from itertools import combinations

import pytest

from quartet.data.repeated_samples import majority_at_k, majority_is_success, pass_at_k


@pytest.mark.parametrize(
    ("samples", "successes", "k", "expected"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of 6 pairs have the success
        (4, 2, 2, 5 / 6),  # only the pair of the two failures has none
        (5, 2, 3, 9 / 10),
        (10, 3, 5, 1 - 21 / 252),
        (4, 2, 3, 1.0),
        (4, 4, 1, 1.0),
    ],
)
def test_pass_at_k_is_the_value_computed_by_hand(samples: int, successes: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, successes, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("successes", range(8))
def test_pass_at_k_is_the_share_of_all_choices_with_a_success(successes: int, k: int) -> None:
    choices = list(combinations([True] * successes + [False] * (7 - successes), k))
    assert pass_at_k(7, successes, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_many_samples_stays_exact() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(("samples", "successes", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(samples: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, successes, k)


def test_the_most_frequent_answer_decides() -> None:
    assert majority_is_success(["7", "8", "8"], [False, True, True])
    assert not majority_is_success(["7", "7", "8"], [False, False, True])


def test_of_equally_frequent_answers_the_first_decides() -> None:
    assert majority_is_success(["7", "8"], [True, False])
    assert not majority_is_success(["8", "7"], [False, True])
    assert majority_is_success(["3", "8", "7", "7", "8"], [False, True, False, False, True])


def test_responses_without_an_answer_have_no_vote() -> None:
    assert majority_is_success([None, None, "8"], [False, False, True])
    assert not majority_is_success([None, None], [True, True])


def test_majority_at_k_is_the_mean_over_groups_of_k_samples() -> None:
    answers = ["7", "8", "8", "7", "7", "8", "9", "9"]
    successes = [answer == "8" for answer in answers]
    assert majority_at_k(answers, successes, 1) == 3 / 8
    # The groups are 7 8 8 and 7 7 8; 9 9 is the rest.
    assert majority_at_k(answers, successes, 3) == 1 / 2
    # All vote: 8 has as many votes as 7, which came first.
    assert majority_at_k(answers, successes, 8) == 0


@pytest.mark.parametrize("k", [0, 3])
def test_majority_at_k_refuses_a_k_without_a_group(k: int) -> None:
    with pytest.raises(ValueError, match=f"maj@{k}"):
        majority_at_k(["7", "8"], [True, False], k)
