"""Flat tensors with lengths: sums, padding, positions."""

from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from quartet.errors import InvalidRequest
from quartet.ppo.ragged import FEW, check_flat, discounted_sum, from_padded, last_token_index, sequence_sum, to_padded
from tests.unit.ppo.batches import draw, gradient, ragged_lengths, seeds, split


@given(ragged_lengths, seeds)
def test_a_sequence_sum_is_the_sum_of_its_tokens(lengths: list[int], seed: int) -> None:
    values = draw(seed, sum(lengths))
    expected = [math.fsum(sequence) for sequence in split(values, lengths)]
    sums = sequence_sum(values, torch.tensor(lengths))
    assert sums.dtype == torch.float32
    assert sums.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(ragged_lengths, ragged_lengths, seeds)
def test_other_sequences_do_not_change_the_bits_of_a_sum(lengths: list[int], others: list[int], seed: int) -> None:
    values, more = draw(seed, sum(lengths)), draw(seed + 1, sum(others), scale=1e6)
    expected = sequence_sum(values, torch.tensor(lengths))
    together = sequence_sum(torch.cat([values, more]), torch.tensor(lengths + others))
    assert torch.equal(together[: len(lengths)], expected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3 * FEW), st.lists(st.integers(20, 60), max_size=3), seeds)
def test_sequences_with_their_own_discount_match_a_loop_to_the_bit(
    short: list[int], long: list[int], seed: int
) -> None:
    random_order = random.Random(seed)
    lengths = random_order.sample(short + long, len(short + long))
    discounts = [random_order.random() for _ in lengths]
    values = draw(seed, sum(lengths))
    expected = []
    for sequence, discount in zip(split(values, lengths), discounts, strict=True):
        later = [0.0]
        for value in reversed(sequence):
            later.append(value + discount * later[-1])
        expected += later[:0:-1]
    sums = discounted_sum(values, torch.tensor(lengths), torch.tensor(discounts, dtype=torch.float64))
    assert sums.tolist() == expected


def test_a_discount_for_each_sequence_has_as_many_numbers() -> None:
    with pytest.raises(InvalidRequest, match="same length"):
        discounted_sum(torch.zeros(3), torch.tensor([1, 2]), torch.ones(3, dtype=torch.float64))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3 * FEW), st.lists(st.integers(20, 60), max_size=3), seeds)
def test_a_discounted_sum_is_bit_identical_to_a_loop_over_tokens(short: list[int], long: list[int], seed: int) -> None:
    lengths = random.Random(seed).sample(short + long, len(short + long))
    values = draw(seed, sum(lengths))
    expected = []
    for sequence in split(values, lengths):
        later = [0.0]
        for value in reversed(sequence):
            later.append(value + 0.9405 * later[-1])
        expected += later[:0:-1]
    sums = discounted_sum(values, torch.tensor(lengths, dtype=torch.int32), 0.9405)
    assert sums.dtype == torch.float64
    assert sums.tolist() == expected


def test_every_token_gets_the_gradient_of_its_sequence_sum() -> None:
    weights = torch.tensor([2.0, 5.0])
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    assert gradient(lambda x: (sequence_sum(x, lengths) * weights).sum(), torch.ones(3)) == [2.0, 5.0, 5.0]


@given(ragged_lengths, seeds)
def test_padding_keeps_every_token_at_its_position(lengths: list[int], seed: int) -> None:
    values = draw(seed, sum(lengths))
    padded = to_padded(values, torch.tensor(lengths), fill=-7.0)
    longest = max(lengths)
    assert padded.tolist() == [row + [-7.0] * (longest - len(row)) for row in split(values, lengths)]


@given(ragged_lengths, seeds)
def test_unpadding_removes_all_padding(lengths: list[int], seed: int) -> None:
    values = draw(seed, sum(lengths))
    padded = to_padded(values, torch.tensor(lengths), fill=math.nan)
    wider = torch.cat([padded, torch.full((len(lengths), 3), math.nan)], dim=1)
    assert torch.equal(from_padded(padded, torch.tensor(lengths)), values)
    assert torch.equal(from_padded(wider, torch.tensor(lengths)), values)


def test_a_discounted_sum_has_no_gradient() -> None:
    assert not discounted_sum(torch.ones(3, requires_grad=True), torch.tensor([2, 1]), 0.5).requires_grad


def test_a_batch_without_sequences_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one sequence"):
        sequence_sum(torch.zeros(0), torch.zeros(0, dtype=torch.long))


def test_padding_and_unpadding_are_differentiable() -> None:
    lengths = torch.tensor([2, 1])
    assert gradient(lambda x: (to_padded(x, lengths) * 3).sum(), torch.ones(3)) == [3.0, 3.0, 3.0]
    padded = torch.ones(2, 2, requires_grad=True)
    from_padded(padded, lengths).sum().backward()
    assert padded.grad is not None
    assert padded.grad.tolist() == [[1.0, 1.0], [1.0, 0.0]]


@given(ragged_lengths)
def test_the_last_token_is_the_one_before_the_next_sequence(lengths: list[int]) -> None:
    index = last_token_index(torch.tensor(lengths, dtype=torch.int32))
    assert index.dtype == torch.int64
    assert index.tolist() == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]


@pytest.mark.parametrize(
    "lengths",
    [[2, 2], [3, 0], [4, -1], [], [[1, 2]], [1.0, 2.0], [True, True, True]],
    ids=["too many", "empty sequence", "negative", "no sequence", "two-dimensional", "float", "bool"],
)
def test_lengths_that_do_not_match_the_tokens_are_refused(lengths: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        sequence_sum(torch.zeros(3), torch.tensor(lengths))


def test_a_padded_matrix_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 3 columns"):
        from_padded(torch.zeros(2, 2), torch.tensor([3, 1]))
    with pytest.raises(InvalidRequest, match="2 rows"):
        from_padded(torch.zeros(1, 3), torch.tensor([3, 1]))


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="same length"):
        check_flat(values=torch.zeros(3), mask=torch.zeros(1))
    with pytest.raises(InvalidRequest, match="one-dimensional"):
        check_flat(values=torch.zeros(3, 1), mask=torch.zeros(3, 1))
