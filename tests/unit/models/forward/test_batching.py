"""Micro-batches contain every sequence once and stay within the token budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.errors import InvalidRequest
from quartet.models.forward.batching import MAX_ATTENTION_EXPANSION, build_micro_batch, micro_batches, right_pad
from tests.unit.models import tiny


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = micro_batches(lengths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget
    assert groups == micro_batches(np.array(lengths, np.int32), budget)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_packed_micro_batches_limit_the_tokens_and_the_padding_in_attention(lengths: list[int], budget: int) -> None:
    groups = micro_batches(lengths, budget, packed=True)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[index] for index in group]
        assert len(group) == 1 or (sum(sizes) <= budget and len(group) * max(sizes) <= MAX_ATTENTION_EXPANSION * budget)
    assert len(groups) <= len(micro_batches(lengths, budget))


def test_similar_lengths_share_a_micro_batch_and_equal_lengths_keep_their_order() -> None:
    assert micro_batches([3, 9, 3, 8, 3], 18) == [[1, 3], [0, 2, 4]]


def test_a_sequence_longer_than_the_budget_gets_a_separate_micro_batch() -> None:
    assert micro_batches([2, 30, 2], 4) == [[1], [0, 2]]


def test_a_budget_of_zero_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens 0"):
        micro_batches([1], 0)


def test_padding_is_on_the_right_and_zero() -> None:
    padded = right_pad([np.array([5, 6], np.int32), np.array([7], np.int32)], "cpu")
    assert padded.tolist() == [[5, 6], [7, 0]]


def test_a_micro_batch_has_the_response_tokens_and_the_positions_that_predict_them() -> None:
    batch = tiny.batch([2, 3, 1], [2, 1, 3])
    sequences, micro_batch = batch.sequences(), build_micro_batch(batch, [2, 0], "cpu")
    assert micro_batch.input_ids.tolist() == [[*sequences[2][:-1]], [*sequences[0][:-1]]]
    assert micro_batch.predicts.tolist() == [[True, True, True], [False, True, True]]
    assert micro_batch.targets.tolist() == [*sequences[2][1:], *sequences[0][2:]]
    assert micro_batch.token_indices.tolist() == [3, 4, 5, 0, 1]
    assert micro_batch.lengths.tolist() == [3, 2]
    assert len(micro_batch) == 5


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_token_is_included_on_request(packed: bool) -> None:
    batch = tiny.batch([2, 3], [2, 1])
    micro_batch = build_micro_batch(batch, [0, 1], "cpu", packed, include_last_token=True)
    ends = [sequence[-1] for sequence in batch.sequences()]
    assert micro_batch.input_ids.flatten()[micro_batch.last].tolist() == ends
    predicts = micro_batch.predicts if packed else micro_batch.predicts.flatten().nonzero().flatten()
    assert not set(micro_batch.last.tolist()) & set(predicts.tolist())
