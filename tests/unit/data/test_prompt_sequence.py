"""Draws of prompts across the borders of steps and passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.contract.trajectory import Prompt
from quartet.data.prompt_order import (
    MixedPromptOrder,
    PromptDraw,
    PromptOrder,
    PromptSequence,
    StepPrompts,
    WeightedPrompts,
)


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(first + index, np.ones(1, np.int32)) for index in range(count)]


def one_set(per_step: int, size: int = 20) -> StepPrompts:
    return PromptOrder(prompts(size), per_step, seed=3)


def two_sets(per_step: int) -> StepPrompts:
    sets = [WeightedPrompts("a", 1, prompts(9)), WeightedPrompts("b", 2.5, prompts(30, 1000))]
    return MixedPromptOrder(sets, per_step, seed=3)


def indices(draw: PromptDraw) -> list[int]:
    return [prompt.index for prompt in draw.prompts]


@pytest.mark.parametrize("order", [one_set, two_sets])
def test_draws_of_whole_steps_are_the_prompts_of_the_steps(order: type[StepPrompts]) -> None:
    sequence, consumed = PromptSequence(order(4), 4), 0
    for step in range(1, 40):
        draw = sequence.draw(consumed, 4)
        assert indices(draw) == [prompt.index for prompt in order(4).of_step(step)]
        consumed = draw.consumed
        assert consumed == 4 * step


@pytest.mark.parametrize("order", [one_set, two_sets])
def test_sequences_of_every_third_step_share_no_prompt_of_the_order(order: type[StepPrompts]) -> None:
    for first in (1, 2, 3):
        sequence, consumed = PromptSequence(order(4), 4, first, stride=3), 0
        steps = range(first, 30, 3)
        expected = [prompt.index for step in steps for prompt in order(4).of_step(step)]
        for number in (4, 1, 3, 4):
            draw = sequence.draw(consumed, number)
            assert indices(draw) == list(dict.fromkeys(expected[consumed : draw.consumed]))
            consumed = draw.consumed


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.booleans())
def test_draws_of_any_size_take_each_prompt_of_the_order_once(numbers: list[int], mixed: bool) -> None:
    order = two_sets(5) if mixed else one_set(5)
    sequence, consumed = PromptSequence(order, 5), 0
    whole = [prompt.index for step in range(1, 60) for prompt in order.of_step(step)]
    for number in numbers:
        draw = sequence.draw(consumed, number)
        # Only a prompt that is drawn already is skipped, at the border of two passes.
        assert indices(draw) == list(dict.fromkeys(whole[consumed : draw.consumed]))
        assert len(draw.prompts) == number
        consumed = draw.consumed


def test_a_draw_depends_on_its_arguments_only() -> None:
    sequence = PromptSequence(one_set(4), 4)
    expected = [sequence.draw(consumed, 3, {1, 2}) for consumed in range(60)]
    assert [PromptSequence(one_set(4), 4).draw(consumed, 3, {1, 2}) for consumed in reversed(range(60))] == expected[
        ::-1
    ]


def test_excluded_prompts_are_skipped_and_consumed() -> None:
    sequence = PromptSequence(one_set(4), 4)
    first, second, third, *_ = indices(sequence.draw(0, 4))
    draw = sequence.draw(0, 2, {first, second})
    assert indices(draw)[0] == third
    assert draw.consumed == 4


def test_a_small_data_set_gives_fewer_prompts_rather_than_one_twice() -> None:
    sequence = PromptSequence(one_set(4, size=5), 4)
    for consumed in range(40):
        draw = sequence.draw(consumed, 4, {0, 1, 2})
        assert 1 <= len(draw.prompts) <= 2
        assert set(indices(draw)) <= {3, 4}
        assert len(set(indices(draw))) == len(draw.prompts)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 200), st.data())
def test_a_draw_is_never_empty(per_step: int, more: int, consumed: int, data: st.DataObject) -> None:
    size = per_step + more
    excluded = data.draw(st.sets(st.integers(0, size - 1), max_size=per_step - 1))
    draw = PromptSequence(one_set(per_step, size), per_step).draw(consumed, per_step, excluded)
    assert draw.prompts
    assert not set(indices(draw)) & excluded
    assert draw.consumed > consumed
    if not excluded:
        assert len(draw.prompts) == per_step
