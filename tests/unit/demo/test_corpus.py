"""The synthetic corpus: it is deterministic, and its reviews and preferences have the documented distribution."""

from __future__ import annotations

import statistics

import pytest

from quartet.demo import corpus


def test_the_same_seed_gives_the_same_corpus() -> None:
    assert corpus.reviews(50, seed=3) == corpus.reviews(50, seed=3)
    assert corpus.preferences(50, seed=3) == corpus.preferences(50, seed=3)


def test_another_seed_gives_another_corpus() -> None:
    assert corpus.reviews(50, seed=3) != corpus.reviews(50, seed=4)
    assert corpus.preferences(50, seed=3) != corpus.preferences(50, seed=4)


def test_prompts_are_a_few_hundred_distinct_and_short() -> None:
    prompts = corpus.prompts()
    assert 200 <= len(prompts) <= 500
    assert len(set(prompts)) == len(prompts)
    assert max(len(prompt.split()) for prompt in prompts) <= 10


def test_reviews_are_well_formed_and_their_favourable_clauses_are_counted() -> None:
    for review in corpus.reviews(200, seed=0):
        assert corpus.is_well_formed(review.response)
        assert corpus.favourable_clauses(review.response) == review.favourable
        assert review.prompt in corpus.prompts()


def test_clauses_are_favourable_independently_with_the_stated_share() -> None:
    counts = [review.favourable for review in corpus.reviews(4000, seed=1)]
    share = corpus.FAVOURABLE_SHARE
    assert statistics.mean(counts) / corpus.CLAUSES == pytest.approx(share, abs=0.015)
    # Independent clauses have the binomial variance; dependent ones would not.
    assert statistics.variance(counts) == pytest.approx(corpus.CLAUSES * share * (1 - share), rel=0.1)


def test_the_best_response_is_three_standard_deviations_above_the_mean() -> None:
    counts = [review.favourable for review in corpus.reviews(4000, seed=1)]
    assert corpus.CLAUSES - statistics.mean(counts) > 3 * statistics.stdev(counts)


COMPLETE = (
    " the soup was superb",
    "the fish was great",
    "the wine was sad",
    "our waiter was bad",
    "the room was fair",
    "the bill was poor .",
)


def test_a_well_formed_review_has_every_aspect_in_order_and_a_full_stop() -> None:
    complete = " , ".join(COMPLETE)
    assert corpus.is_well_formed(complete)
    assert not corpus.is_well_formed("")
    assert not corpus.is_well_formed(" the soup was superb .")
    assert not corpus.is_well_formed(complete.removesuffix(" ."))
    assert not corpus.is_well_formed(complete.replace("superb", "salty"))
    assert not corpus.is_well_formed(complete.replace("fish", "wine"))
    assert not corpus.is_well_formed(complete.replace(" .", " , the staff was great ."))


def test_the_judge_prefers_more_favourable_clauses_with_some_errors() -> None:
    pairs = corpus.preferences(3000, seed=2, unfinished_share=0.0)
    differences = [corpus.favourable_clauses(p.chosen) - corpus.favourable_clauses(p.rejected) for p in pairs]
    ones = [difference for difference in differences if abs(difference) == 1]
    assert sum(difference > 0 for difference in ones) / len(ones) == pytest.approx(0.731, abs=0.05)  # sigmoid(1)
    threes = [difference for difference in differences if abs(difference) == 3]
    assert sum(difference > 0 for difference in threes) / len(threes) > 0.9


def test_truncated_and_incomplete_responses_are_rejected() -> None:
    pairs = corpus.preferences(400, seed=2, unfinished_share=1.0)
    assert all(corpus.is_well_formed(pair.chosen) for pair in pairs)
    assert not any(corpus.is_well_formed(pair.rejected) for pair in pairs)
    unfinished = [pair for pair in pairs if pair.unfinished]
    assert 100 < len(unfinished) < 300
    assert not any(pair.rejected.endswith(".") for pair in unfinished)
    assert all(pair.rejected.endswith(" .") for pair in pairs if not pair.unfinished)
