"""Whitening and training diagnostics, compared with NumPy in float64."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import from_padded, to_padded
from quartet.ppo.statistics import correlation, distinct, explained_variance, repetition, slope, whiten
from tests.unit.ppo.batches import draw, draw_mask, ragged_lengths, seeds


@given(st.integers(1, 60), seeds, st.booleans(), st.booleans())
def test_whitening_follows_its_definition(tokens: int, seed: int, shift_mean: bool, masked: bool) -> None:
    values = draw(seed, tokens, scale=3.0) + 2
    mask = draw_mask(seed + 1, tokens) if masked else None
    counts = [1.0] * tokens if mask is None else mask.tolist()
    counted_values = [v for v, counted in zip(values.tolist(), counts, strict=True) if counted]
    mean = math.fsum(counted_values) / len(counted_values)
    variance = math.fsum((v - mean) ** 2 for v in counted_values) / len(counted_values)
    back = 0.0 if shift_mean else mean
    expected = [(v - mean) / math.sqrt(variance + 1e-8) + back for v in values.tolist()]
    assert whiten(values, shift_mean, mask).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@given(st.integers(20, 60), seeds)
def test_whitened_advantages_have_mean_zero_and_rewards_keep_their_mean(tokens: int, seed: int) -> None:
    values = draw(seed, tokens, scale=3.0) + 2
    advantages, rewards = whiten(values, shift_mean=True).numpy(), whiten(values, shift_mean=False).numpy()
    assert np.mean(advantages, dtype=np.float64) == pytest.approx(0.0, abs=1e-6)
    assert np.mean(rewards, dtype=np.float64) == pytest.approx(values.mean().item(), rel=1e-5)
    assert np.std(advantages, dtype=np.float64) == pytest.approx(1.0, rel=1e-5)
    assert np.std(rewards, dtype=np.float64) == pytest.approx(1.0, rel=1e-5)


@given(ragged_lengths, seeds)
def test_masked_tokens_do_not_affect_the_moments(lengths: list[int], seed: int) -> None:
    values, sizes = draw(seed, sum(lengths)), torch.tensor(lengths)
    padded = to_padded(values, sizes, fill=math.nan)
    inside = to_padded(torch.ones_like(values), sizes)
    whitened = whiten(padded.flatten(), True, inside.flatten()).view(padded.shape)
    assert torch.equal(from_padded(whitened, sizes), whiten(values, True))


@pytest.mark.parametrize("values", [[3.0], [0.1] * 7, [1e6 + 0.5] * 1001], ids=["one token", "constant", "large"])
def test_whitening_without_variance_gives_zeros_or_the_mean(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert whiten(tensor, shift_mean=True).tolist() == pytest.approx([0.0] * len(values), abs=1e-5)
    assert whiten(tensor, shift_mean=False).tolist() == pytest.approx(tensor.tolist(), rel=1e-6)


def test_whitening_with_an_empty_mask_returns_the_values() -> None:
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(whiten(values, True, torch.zeros(2)), values)


def test_a_small_variance_around_a_large_mean_keeps_its_precision() -> None:
    values = torch.tensor([4096.0, 4096.5] * 50_000)
    assert whiten(values, True)[:2].tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)


@given(st.integers(2, 60), seeds)
def test_explained_variance_follows_its_definition(tokens: int, seed: int) -> None:
    values, returns = draw(seed, tokens), draw(seed + 1, tokens)
    v, r = values.numpy().astype(np.float64), returns.numpy().astype(np.float64)
    residual = np.mean((r - v - (r - v).mean()) ** 2)
    assert explained_variance(values, returns) == pytest.approx(1 - residual / np.mean((r - r.mean()) ** 2), rel=1e-6)


def test_explained_variance_without_tokens_is_zero() -> None:
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0


def test_explained_variance_of_a_perfect_a_constant_and_an_opposite_critic() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 10, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((3,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)


@given(st.floats(-1e3, 1e3), st.integers(1, 2000))
def test_explained_variance_of_equal_returns_is_zero(value: float, tokens: int) -> None:
    # In float64 the rounded mean of equal numbers may differ from them, so their computed variance may not be 0.
    assert explained_variance(draw(0, tokens), torch.full((tokens,), value, dtype=torch.float64)) == 0.0


def repeated_by_definition(ids: list[int], n: int) -> float:
    if len(ids) < n + 1:
        return 0.0
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return sum(grams[i] in grams[:i] for i in range(len(grams))) / len(grams)


@given(st.lists(st.lists(st.integers(0, 2), max_size=15), min_size=1, max_size=6), st.integers(1, 4))
def test_repetition_counts_ngrams_seen_before_in_the_same_response(responses: list[list[int]], n: int) -> None:
    expected = sum(repeated_by_definition(ids, n) for ids in responses) / len(responses)
    assert repetition(responses, n) == pytest.approx(expected)
    assert repetition([np.array(ids, np.int32) for ids in responses], n) == pytest.approx(expected)


def test_repetition_of_worked_examples() -> None:
    assert repetition([[1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repetition([[1, 2, 3, 1, 2, 3]]) == pytest.approx(1 / 4)
    assert repetition([[1, 2, 3], [1, 2, 3]]) == 0.0
    assert repetition([]) == 0.0


@given(st.lists(st.lists(st.integers(0, 2), max_size=15), max_size=6), st.integers(1, 4))
def test_distinct_is_the_fraction_of_distinct_ngrams_in_the_batch(responses: list[list[int]], n: int) -> None:
    grams = [tuple(ids[i : i + n]) for ids in responses for i in range(len(ids) - n + 1)]
    first_seen = [gram not in grams[:index] for index, gram in enumerate(grams)]
    expected = sum(first_seen) / len(grams) if grams else 0.0
    assert distinct(responses, n) == pytest.approx(expected)
    assert distinct([np.array(ids, np.int32) for ids in responses], n) == pytest.approx(expected)


@given(st.lists(st.lists(st.sampled_from([0, 5, 2**31 - 1]), max_size=15), min_size=1, max_size=6), st.integers(1, 4))
def test_ngrams_support_the_largest_token_ids(responses: list[list[int]], n: int) -> None:
    small = [[{0: 0, 5: 1, 2**31 - 1: 2}[token] for token in ids] for ids in responses]
    assert repetition(responses, n) == repetition(small, n)
    assert distinct(responses, n) == distinct(small, n)


@pytest.mark.parametrize("last", [2**62 - 2, (2**63 - 1) // 3], ids=["3 (last + 1) > 2^63", "3 last < 2^63"])
def test_the_response_of_an_ngram_is_found_at_the_limit_of_64_bits(last: int) -> None:
    # An n-gram of two tokens a, b is the number a 2^31 + b, and that of response 2 is ``last``. With its response, a third of the
    # numbers would not be enough.
    first, second = divmod(last, 2**31)
    responses = [[0, 2**31 - 1], [1, 1, 1], [first, second]]
    assert repetition(responses, 2) == pytest.approx((0 + 1 / 2 + 0) / 3)
    assert distinct(responses, 2) == 3 / 4


def test_ngrams_beyond_64_bits_are_told_apart() -> None:
    largest = 2**31 - 1
    assert distinct([[largest, largest, largest], [0, 0, largest], [0, largest, 0]], 3) == 1.0
    # There are 8 third tokens. As a number, the first n-gram is 2^30 2^31 8 + 5 = 2^64 + 5, which 64 bits do not tell from 5.
    assert distinct([[2**30, 0, 5], [0, 0, 5], [largest, 1, 2, 3, 4, 6]], 3) == 1.0


def test_distinct_of_worked_examples() -> None:
    assert distinct([[1, 2, 3], [1, 2, 3]], 2) == pytest.approx(2 / 4)
    assert distinct([[1, 2], [3, 4]], 2) == 1.0  # (2, 3) would span two responses
    assert distinct([[7, 7, 7, 7]], 1) == pytest.approx(1 / 4)
    assert distinct([[1], []], 2) == 0.0
    assert distinct([], 1) == 0.0


@pytest.mark.parametrize("responses", [[], [[1, 2]]])
def test_ngrams_of_size_zero_are_refused(responses: list[list[int]]) -> None:
    with pytest.raises(InvalidRequest):
        repetition(responses, n=0)
    with pytest.raises(InvalidRequest):
        distinct(responses, n=0)


@given(st.integers(2, 60), seeds)
def test_correlation_is_pearsons(count: int, seed: int) -> None:
    a, b = draw(seed, count), draw(seed + 1, count, scale=5.0) + 3
    expected = np.corrcoef(a.numpy().astype(np.float64), b.numpy().astype(np.float64))[0, 1]
    assert correlation(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert -1.0 <= correlation(a, a * 3 + 1) <= 1.0


def test_rounding_takes_no_correlation_above_1() -> None:
    # Without the limit, it is 1 + 2^-52 for many of these pairs, such as 0.1 and 0.6.
    for i in range(10):
        for j in range(i):
            a = torch.tensor([i / 10, j / 10], dtype=torch.float64)
            assert 1 - 1e-12 <= correlation(a, 3 * a) <= 1
            assert -1 <= correlation(a, -3 * a) <= -1 + 1e-12


def test_correlation_of_lines_and_of_constant_values() -> None:
    a = torch.tensor([1.0, 2.0, 4.0])
    assert correlation(a, 10 - 2 * a) == pytest.approx(-1.0)
    assert correlation(a.long(), a + 5) == pytest.approx(1.0)
    flat = torch.full((3,), 0.1, dtype=torch.float64)
    assert correlation(a, flat) == correlation(flat, a) == correlation(flat, flat) == 0.0
    assert correlation(a[:1], a[:1]) == correlation(a[:0], a[:0]) == 0.0


def test_correlation_with_a_nan_is_nan() -> None:
    assert math.isnan(correlation(torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])))


@given(st.integers(2, 60), seeds)
def test_the_slope_is_that_of_the_least_squares_line(count: int, seed: int) -> None:
    values = (draw(seed, count).double() + 100).tolist()
    assert slope(values) == pytest.approx(np.polyfit(np.arange(count), values, 1)[0], rel=1e-6, abs=1e-9)


def test_slopes_of_worked_examples() -> None:
    assert slope([1.0, 3.0, 5.0]) == 2.0
    assert slope([0.0, 1.0, 0.0, 1.0]) == pytest.approx(0.2)
    assert slope([0.1] * 7) == 0.0
    assert slope([4.0]) == slope([]) == 0.0


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        whiten(torch.zeros(3), True, torch.ones(1))
    with pytest.raises(InvalidRequest):
        explained_variance(torch.zeros(3), torch.ones(1))
    with pytest.raises(InvalidRequest):
        correlation(torch.zeros(3), torch.ones(1))
