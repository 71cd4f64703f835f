"""Prompts: what is refused, what is dropped, and the order in which steps take them."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from quartet.data import MAX_LINE_BYTES, PromptLine, PromptOrder, PromptSet, encode_prompts, read_prompt_lines
from quartet.errors import ConfigError, DataError
from quartet.types import Prompt

check = settings(max_examples=60, deadline=None, derandomize=True)


def prompts_file(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def test_text_and_token_ids_are_read_with_their_line_numbers_and_blank_lines_left_out(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, '{"text": "héllo", "more": 1}', "", "  ", '{"token_ids": [3, 0]}')
    assert read_prompt_lines(path) == [PromptLine(1, "héllo", None), PromptLine(4, None, (3, 0))]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "open', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"token_ids": [' + "1" * 5000 + "]}", "not JSON"),
        ('["text"]', "found list"),
        ("3", "found int"),
        ("{}", "found neither of text and token_ids"),
        ('{"text": null}', "found neither"),
        ('{"text": "a", "token_ids": [1]}', "found both"),
        ('{"text": ""}', "text is empty"),
        ('{"text": 3}', "text is not a string"),
        ('{"text": "\\ud800"}', "text"),
        ('{"token_ids": []}', "token_ids is not a list of token ids"),
        ('{"token_ids": "12"}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1, -1]}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1.0]}', "token_ids is not a list of token ids"),
        ('{"token_ids": [true]}', "token_ids is not a list of token ids"),
        ('{"token_ids": [2147483648]}', "token_ids is not a list of token ids"),
        (b'{"text": "\xe9"}', "not UTF-8 at byte 11"),
    ],
)
def test_a_malformed_line_is_refused_with_file_line_and_expectation(
    line: str | bytes, problem: str, tmp_path: Path
) -> None:
    path = prompts_file(tmp_path, '{"text": "fine"}', line)
    with pytest.raises(DataError) as refused:
        read_prompt_lines(path)
    said = str(refused.value)
    assert said.startswith(f"prompts {path}:2: {problem}")
    assert 'expected a JSON object with "text" (a string) or "token_ids" (a list of integers)' in said
    assert "\n" not in said


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, '{"text": "' + "a" * MAX_LINE_BYTES + '"}')
    with pytest.raises(DataError, match="longer than"):
        read_prompt_lines(path)


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_an_empty_file_is_refused(lines: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl: empty; expected at least one prompt"):
        read_prompt_lines(prompts_file(tmp_path, *lines))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give a JSON Lines file"):
        read_prompt_lines(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"give a JSON Lines file"):
        read_prompt_lines(tmp_path)


def encoded(lines: list[PromptLine], limit: int = 5, vocabulary: int = 128) -> PromptSet:
    """Tokenised by character code; "$" is the end of sequence."""
    return encode_prompts(
        Path("p.jsonl"),
        lines,
        lambda texts: [[ord(c) for c in text if c != "_"] for text in texts],
        frozenset({ord("$")}),
        vocabulary,
        limit,
    )


def test_prompts_keep_their_text_ids_and_line_as_index() -> None:
    found = encoded([PromptLine(1, "ab", None), PromptLine(4, None, (7, 8)), PromptLine(9, "c", None)])
    assert [(p.index, p.token_ids.tolist(), p.text) for p in found.prompts] == [
        (0, [97, 98], "ab"),
        (3, [7, 8], ""),
        (8, [99], "c"),
    ]
    assert all(prompt.token_ids.dtype == np.int32 for prompt in found.prompts)
    assert found.notes == []


def test_prompts_over_the_limit_are_dropped_and_counted() -> None:
    found = encoded([PromptLine(n, "a" * n, None) for n in range(1, 9)])
    assert [len(prompt.token_ids) for prompt in found.prompts] == [1, 2, 3, 4, 5]
    assert found.notes == ["3 of 8 prompts are over data.max_prompt_tokens 5 and dropped"]


def test_a_data_set_of_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(DataError, match=r"all 2 are over data\.max_prompt_tokens 5; raise it"):
        encoded([PromptLine(n, "a" * 6, None) for n in (1, 2)])


def test_an_end_of_sequence_that_the_tokenizer_adds_is_taken_off_but_given_ids_stay() -> None:
    found = encoded([PromptLine(1, "ab$", None), PromptLine(2, None, (97, ord("$"))), PromptLine(3, "$", None)])
    assert [prompt.token_ids.tolist() for prompt in found.prompts] == [[97, 98], [97, ord("$")], [ord("$")]]
    assert found.notes == ["1 of 3 prompts ended with an end-of-sequence token; it is taken off"]


def test_ids_outside_the_vocabulary_are_refused_with_their_line() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:4: token id 128; the policy's vocabulary is 0\.\.127"):
        encoded([PromptLine(1, "a", None), PromptLine(4, None, (1, 128))])


def test_a_prompt_without_tokens_is_refused_with_its_line() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:2: the tokenizer makes no token of it"):
        encoded([PromptLine(1, "a", None), PromptLine(2, "_", None)])


def data_set(size: int) -> list[Prompt]:
    return [Prompt(10 * index, np.array([1], np.int32)) for index in range(size)]


def indices(order: PromptOrder, step: int) -> list[int]:
    return [prompt.index for prompt in order.of_step(step)]


@check
@given(st.integers(1, 30), st.data(), st.integers(0, 2**63 - 1))
def test_a_pass_repeats_no_prompt_and_covers_all_but_the_remainder(size: int, data: st.DataObject, seed: int) -> None:
    per_step = data.draw(st.integers(1, size))
    order = PromptOrder(data_set(size), per_step, seed)
    steps_per_pass = size // per_step
    for number in range(2):
        steps = [indices(order, number * steps_per_pass + place + 1) for place in range(steps_per_pass)]
        assert all(len(step) == per_step for step in steps)
        seen = [index for step in steps for index in step]
        assert len(set(seen)) == len(seen) == per_step * steps_per_pass


def test_passes_leave_out_different_remainders_so_all_prompts_come_up() -> None:
    order = PromptOrder(data_set(7), 3, seed=0)
    assert {index for step in range(1, 21) for index in indices(order, step)} == {10 * index for index in range(7)}


def test_a_step_takes_the_same_prompts_whatever_was_asked_before() -> None:
    walked = PromptOrder(data_set(20), 3, seed=5)
    in_order = [indices(walked, step) for step in range(1, 30)]
    fresh = [indices(PromptOrder(data_set(20), 3, seed=5), step) for step in range(29, 0, -1)][::-1]
    assert fresh == in_order


def test_seeds_and_passes_differ() -> None:
    order, other = PromptOrder(data_set(50), 50, seed=1), PromptOrder(data_set(50), 50, seed=2)
    assert indices(order, 1) != indices(other, 1)
    assert indices(order, 1) != indices(order, 2)


def test_too_few_prompts_for_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.prompts_per_step 4: data\.prompts has only 3 usable prompts"):
        PromptOrder(data_set(3), 4, seed=0)
