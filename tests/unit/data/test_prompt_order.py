"""The order of prompts over the steps of a run."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from quartet.contract.trajectory import Prompt
from quartet.data.prompt_order import PromptOrder
from quartet.errors import ConfigError


def data_set(size: int) -> list[Prompt]:
    return [Prompt(10 * index, np.array([1], np.int32)) for index in range(size)]


def indices(order: PromptOrder, step: int) -> list[int]:
    return [prompt.index for prompt in order.of_step(step)]


@given(st.integers(1, 30), st.data(), st.integers(0, 2**63 - 1))
def test_a_pass_repeats_no_prompt_and_covers_all_but_the_remainder(size: int, data: st.DataObject, seed: int) -> None:
    per_step = data.draw(st.integers(1, size))
    order = PromptOrder(data_set(size), per_step, seed)
    steps_per_pass = size // per_step
    for number in range(2):
        steps = [indices(order, number * steps_per_pass + position + 1) for position in range(steps_per_pass)]
        assert all(len(step) == per_step for step in steps)
        used = [index for step in steps for index in step]
        assert len(set(used)) == len(used) == per_step * steps_per_pass


def test_passes_leave_out_different_prompts() -> None:
    order = PromptOrder(data_set(7), 3, seed=0)
    assert {index for step in range(1, 21) for index in indices(order, step)} == {10 * index for index in range(7)}


def test_the_prompts_of_a_step_do_not_depend_on_earlier_calls() -> None:
    walked = PromptOrder(data_set(20), 3, seed=5)
    in_order = [indices(walked, step) for step in range(1, 30)]
    fresh = [indices(PromptOrder(data_set(20), 3, seed=5), step) for step in range(29, 0, -1)][::-1]
    assert fresh == in_order


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_a_resumed_run_continues_the_order(per_step: int, step: int, seed: int) -> None:
    uninterrupted = PromptOrder(data_set(17), per_step, seed)
    expected = [indices(uninterrupted, number) for number in range(1, 45)]
    resumed = PromptOrder(data_set(17), per_step, seed)
    assert [indices(resumed, number) for number in range(step, 45)] == expected[step - 1 :]


def test_the_order_differs_by_seed_and_pass() -> None:
    order, other = PromptOrder(data_set(50), 50, seed=1), PromptOrder(data_set(50), 50, seed=2)
    assert indices(order, 1) != indices(other, 1)
    assert indices(order, 1) != indices(order, 2)


def test_too_few_prompts_for_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.prompts_per_step 4: data\.prompts has only 3 usable prompts"):
        PromptOrder(data_set(3), 4, seed=0)
