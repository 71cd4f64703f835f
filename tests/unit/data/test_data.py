"""Prompts: reading, checks and tokenization."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet.data.prompt_encoding import ENCODE_LINES, PromptEncoder, PromptSet, encode_prompts
from quartet.data.prompt_files import MAX_LINE_BYTES
from quartet.data.prompt_lines import (
    MAX_FIELDS_BYTES,
    MAX_MESSAGES,
    PromptLine,
    iterate_prompt_lines,
    read_prompt_lines,
)
from quartet.data.prompt_settings import PromptSettings
from quartet.errors import DataError
from tests.every_case import every_case
from tests.unit.models import tiny


def prompts_file(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


USER = {"role": "user", "content": "hi"}


def test_prompts_are_read_with_line_numbers_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = prompts_file(
        tmp_path, '{"text": "héllo"}', "", "  ", '{"token_ids": [3, 0]}', json.dumps({"messages": [USER], "text": None})
    )
    assert read_prompt_lines(path) == [
        PromptLine(1, text="héllo", fields='{"text":"héllo"}'),
        PromptLine(4, token_ids=(3, 0)),
        PromptLine(5, messages=(USER,), fields='{"messages":[{"content":"hi","role":"user"}],"text":null}'),
    ]


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (
            '{"text": "a", "level": 3, "answer": {"z": [1.5, null], "b": true}}',
            '{"answer":{"b":true,"z":[1.5,null]},"level":3,"text":"a"}',
        ),
        ('{"token_ids": [4], "answer": "ö", "text": null}', '{"answer":"ö","text":null}'),
        ('{"prompt": "a", "answer": 1}', '{"answer":1,"prompt":"a"}'),
        (
            '{"answer": 2, "messages": [{"role": "user", "content": "a", "name": "b"}]}',
            '{"answer":2,"messages":[{"content":"a","name":"b","role":"user"}]}',
        ),
    ],
)
def test_the_fields_are_compact_json_of_everything_except_token_ids(line: str, fields: str, tmp_path: Path) -> None:
    (read,) = read_prompt_lines(prompts_file(tmp_path, line))
    assert read.fields == fields
    (prompt,) = encoded([read], limit=50).prompts
    assert prompt.fields == fields


@every_case(
    ("line", "problem"),
    [
        ('{"text": "open', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"token_ids": [' + "1" * 5000 + "]}", "not JSON"),
        ('["text"]', "found a list"),
        ("3", "found a number"),
        ("{}", "found none of prompt, text, messages and token_ids, but nothing else"),
        ('{"text": null, "answer": 1}', "text is null"),
        ('{"question": "a", "id": 1}', "found none of prompt, text, messages and token_ids, but id, question"),
        ('{"prompt": "a", "messages": []}', "found prompt and messages; keep one of them, or rename the others"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": []}', "prompt is empty"),
        ('{"prompt": {"role": "user"}}', "prompt is not a string or a list of messages"),
        ('{"prompt": ["a"]}', "prompt: message 1 is not an object"),
        ('{"text": "a", "token_ids": [1]}', "found text and token_ids; keep one of them"),
        ('{"messages": [], "token_ids": [1]}', "found messages and token_ids"),
        ('{"text": "a", "score": NaN}', "not JSON (NaN is not a number in JSON)"),
        ('{"text": ""}', "text is empty"),
        ('{"text": 3}', "text is not a string"),
        ('{"text": "\\ud800"}', "contains half of a character (a lone surrogate)"),
        ('{"text": "a", "answer": "\\udfff"}', "contains half of a character (a lone surrogate)"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": "hi"}', "messages is not a list"),
        ('{"messages": ["hi"]}', "messages: message 1 is not an object"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}',
            "messages: message 2: content is missing",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            "messages: message 1: content: part 1 has the type image_url, but the policy reads text only; remove the part",
        ),
        ('{"messages": [{"role": "user", "content": null}]}', "messages: message 1: content is null; expected a text"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages: message 1: content is of type int; expected a"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "messages: message 1: role is missing or not a string"),
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
    message = str(refused.value)
    assert message.startswith(f"prompts {path}:2: {problem}")
    assert (
        "expected a JSON object per line" in message
        or '(a string), "messages" (a list of objects with' in message
        or ("save the file as UTF-8" in message)
        or "expected whole numbers from 0 to 2147483647" in message
        or ("expected a text or text parts" in message)
        or ("the policy reads text only; remove the part" in message)
    )
    assert "\n" not in message


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, '{"text": "' + "a" * MAX_LINE_BYTES + '"}')
    with pytest.raises(DataError, match="longer than"):
        read_prompt_lines(path)


def test_the_size_of_text_fields_and_messages_is_limited(tmp_path: Path) -> None:
    fitting = "a" * (MAX_FIELDS_BYTES - len('{"text":""}'))
    assert len(read_prompt_lines(prompts_file(tmp_path, json.dumps({"text": fitting})))) == 1
    with pytest.raises(DataError, match=rf":1: {MAX_FIELDS_BYTES + 2} bytes of text and fields, expected at most"):
        read_prompt_lines(prompts_file(tmp_path, json.dumps({"text": fitting + "ö"}, ensure_ascii=False)))
    with pytest.raises(DataError, match="messages: 1025 messages, expected at most 1024"):
        read_prompt_lines(prompts_file(tmp_path, json.dumps({"messages": [USER] * (MAX_MESSAGES + 1)})))
    with pytest.raises(DataError, match=r":1: messages: message 1: role is empty"):
        read_prompt_lines(prompts_file(tmp_path, '{"messages": [{"role": "", "content": ""}]}'))


@pytest.mark.parametrize("lines", [(), ("", " ")])
def test_an_empty_file_is_refused(lines: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl: empty; expected at least one prompt"):
        read_prompt_lines(prompts_file(tmp_path, *lines))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such file or directory\); give a file in JSON Lines"):
        read_prompt_lines(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match=r"give a file in JSON Lines"):
        read_prompt_lines(tmp_path)


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text if character != "_"]


def texts(batch: list[str]) -> list[list[int]]:
    return [ids_of(text) for text in batch]


def chat(messages: list[dict[str, Any]], ending: str = "generation prompt", *_: Any) -> str:
    """Apply a test chat template: "ROLE:CONTENT;" for each message, then "a:"."""
    for message in messages:
        if message["role"] not in ("user", "assistant"):
            raise ValueError(f"no {message['role']} here\nand more")
    written = "".join(f"{message['role'][0]}:{message['content']};" for message in messages)
    return {"generation prompt": f"{written}a:", "open message": written[:-1], "nothing": written}[ending]


PLAIN, CHAT = PromptEncoder("policies/a", texts), PromptEncoder("policies/a", texts, chat, texts)


def encode(
    lines: Iterable[PromptLine],
    encoder: PromptEncoder,
    stop_ids: frozenset[int] = frozenset(),
    vocabulary: int = 128,
    max_prompt_tokens: int = 9,
    **settings: Any,
) -> PromptSet:
    chosen = PromptSettings(Path("p.jsonl"), encoder.model, max_prompt_tokens, **settings)
    return encode_prompts(chosen, lines, encoder, stop_ids, vocabulary)


def encoded(
    lines: list[PromptLine], limit: int = 5, vocabulary: int = 128, encoder: PromptEncoder = PLAIN, **settings: Any
) -> PromptSet:
    """Encode prompts by character code. "$" is the end-of-sequence token."""
    if any(line.messages for line in lines):
        encoder = CHAT
    return encode(lines, encoder, frozenset({ord("$")}), vocabulary, limit, **settings)


def test_prompts_keep_their_text_ids_and_line_as_index() -> None:
    result = encoded([PromptLine(1, "ab"), PromptLine(4, token_ids=(7, 8)), PromptLine(9, "c")])
    assert [(p.index, p.token_ids.tolist(), p.text) for p in result.prompts] == [
        (0, [97, 98], "ab"),
        (3, [7, 8], ""),
        (8, [99], "c"),
    ]
    assert all(prompt.token_ids.dtype == np.int32 for prompt in result.prompts)
    assert result.notes == []


def test_messages_are_formatted_by_the_chat_template_and_counted() -> None:
    lines = [PromptLine(1, token_ids=(1,)), PromptLine(2, messages=(USER,)), PromptLine(3, token_ids=(2,))]
    result = encoded(lines, limit=20)
    assert result.prompts[1].token_ids.tolist() == ids_of("u:hi;a:")
    assert result.notes == ["1 of 3 prompts are messages, written out by the chat template of policies/a"]


ANSWERED = (USER, {"role": "assistant", "content": "oh"})


def test_messages_that_end_with_the_assistant_are_refused_or_continued() -> None:
    lines = [PromptLine(1, messages=(*ANSWERED, USER)), PromptLine(4, messages=ANSWERED)]
    with pytest.raises(DataError, match=r"p\.jsonl:4: the last message is the assistant's; set data\.continue_final_m"):
        encoded(lines, limit=50)
    result = encoded(lines, limit=50, continue_final_message=True)
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [
        ids_of("u:hi;a:oh;u:hi;a:"),
        ids_of("u:hi;a:oh"),
    ]


def test_the_chat_template_leaves_a_continued_message_open() -> None:
    tokenizer = chatting()
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ m.content }} w9")
    messages = ({"role": "user", "content": "w8"}, {"role": "assistant", "content": "w3 w4"})
    lines = [PromptLine(1, messages=messages)]
    result = encode(lines, PromptEncoder.of(tokenizer, "m"), vocabulary=tiny.VOCABULARY, continue_final_message=True)
    assert result.prompts[0].token_ids.tolist() == [5, 6, 8, 9, 6, 3, 4]


def test_plain_text_with_a_chat_template_is_used_unchanged_and_noted() -> None:
    lines = [PromptLine(1, "ab"), PromptLine(2, token_ids=(1,)), PromptLine(3, "c")]
    result = encoded(lines, encoder=CHAT)
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [[97, 98], [1], [99]]
    assert result.notes == [
        "the tokenizer of policies/a has a chat template; 2 of 3 prompts are plain text and used as they are "
        "(messages would go through it)"
    ]
    assert encoded(lines).notes == []
    # The policy does not get the prompts of agents.
    assert encoded(lines, encoder=CHAT, for_agents=True).notes == []


def test_messages_without_a_chat_template_are_refused_with_advice() -> None:
    with pytest.raises(
        DataError, match=r"p\.jsonl:7: prompt needs a chat template, but the tokenizer of policies/a has none; give"
    ):
        encode([PromptLine(7, messages=(USER,))], PLAIN, frozenset(), 128, 9)


def test_messages_that_the_template_refuses_are_reported_in_one_line() -> None:
    invalid = ({"role": "judge", "content": ""},)
    with pytest.raises(DataError) as refused:
        encoded([PromptLine(1, messages=(USER,)), PromptLine(5, messages=invalid)])
    message = str(refused.value)
    assert message.startswith(
        "prompts p.jsonl:5: the chat template of policies/a refuses the messages of prompt: no judge here (Val"
    )
    assert "\n" not in message


BEGINNING = "w5"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    " w6 {{ m.content }}{% endfor %}{% if add_generation_prompt %} w7{% endif %}"
)


def chatting() -> Any:
    """Return a tokenizer that, like its chat template, starts every text with a special token."""
    from tokenizers.processors import TemplateProcessing

    result = tiny.tokenizer()
    result.backend_tokenizer.post_processor = TemplateProcessing(single="w5 $A", special_tokens=[("w5", 5)])
    result.add_special_tokens({"bos_token": BEGINNING})
    result.chat_template = TEMPLATE
    return result


def test_the_chat_template_adds_special_tokens_once_and_opens_the_response() -> None:
    encoder = PromptEncoder.of(chatting(), "m")
    assert encoder.texts(["w8 w9"]) == [[5, 8, 9]]
    assert encoder.texts([]) == []
    lines = [PromptLine(1, "w8 w9"), PromptLine(2, messages=({"role": "user", "content": "w8 w9"},))]
    result = encode(lines, encoder, frozenset({1}), tiny.VOCABULARY, 9)
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [[5, 8, 9], [5, 6, 8, 9, 7]]
    tool = PromptLine(2, messages=({"role": "tool", "content": "w8"},))
    with pytest.raises(DataError, match=r"p\.jsonl:2: .* refuses the messages of prompt: no tools \(TemplateError\)"):
        encode([tool], encoder, frozenset(), tiny.VOCABULARY, 9)
    assert PromptEncoder.of(tiny.tokenizer(), "m").render is None


UNOPENED = "the template of m writes no generation prompt: the response may begin with the assistant's header"


def test_a_template_without_a_generation_prompt_is_noted() -> None:
    def notes(template: str) -> list[str]:
        tokenizer = chatting()
        tokenizer.chat_template = template
        lines = [PromptLine(1, messages=({"role": "user", "content": "w8"},))]
        encoder = PromptEncoder.of(tokenizer, "m")
        return encode(lines, encoder, frozenset(), tiny.VOCABULARY, 9).notes

    opening, refusing = "{% if add_generation_prompt %} w7{% endif %}", "{% else %}{{ raise_exception('no end') }}"
    assert UNOPENED not in notes(TEMPLATE)
    assert UNOPENED not in notes(TEMPLATE.replace(" w7", f" w7{refusing}"))
    assert UNOPENED in notes(TEMPLATE.replace(opening, ""))


def test_a_template_that_leaves_out_the_bos_token_of_the_tokenizer_is_warned_of() -> None:
    def warnings(tokenizer: Any) -> list[str]:
        lines = [PromptLine(1, messages=({"role": "user", "content": "w8"},)), PromptLine(2, "w8")]
        notes = encode(lines, PromptEncoder.of(tokenizer, "m"), frozenset(), tiny.VOCABULARY, 9).notes
        return [note for note in notes if note.startswith("warning")]

    complete, without, adds_none = chatting(), chatting(), tiny.tokenizer()
    without.chat_template = adds_none.chat_template = "{% for m in messages %} w6 {{ m.content }}{% endfor %}"
    assert warnings(complete) == warnings(adds_none) == []
    (warning,) = warnings(without)
    assert warning.startswith(
        "warning: 1 of 2 prompts are messages for which the chat template of m writes no beginning-of-sequence token, which its "
        "tokenizer adds to texts"
    )


def test_a_text_that_repeats_the_bos_token_of_the_tokenizer_is_noted() -> None:
    encoder = PromptEncoder.of(chatting(), "m")
    lines = [PromptLine(1, "w5 w8"), PromptLine(2, "w8")]
    result = encode(lines, encoder, frozenset(), tiny.VOCABULARY, 9)
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [[5, 5, 8], [5, 8]]
    assert result.notes[0].startswith("1 of 2 prompts are text that begins with the beginning-of-sequence token twice")


def test_prompts_over_the_limit_are_dropped_with_a_warning() -> None:
    result = encoded([PromptLine(n, "a" * n) for n in range(1, 9)])
    assert [len(prompt.token_ids) for prompt in result.prompts] == [1, 2, 3, 4, 5]
    assert result.notes == [
        "warning: 3 of 8 prompts are over data.max_prompt_tokens 5 and dropped; raise it, or set data.truncation"
    ]


def test_more_dropped_prompts_than_allowed_are_refused() -> None:
    lines = [PromptLine(n, "a" * n) for n in range(1, 9)]
    assert len(encoded(lines, max_dropped_fraction=0.375).prompts) == 5
    with pytest.raises(DataError) as refused:
        encoded(lines, max_dropped_fraction=0.37)
    assert str(refused.value) == (
        "prompts p.jsonl: 3 of 8 are over data.max_prompt_tokens 5 and would be dropped, more than "
        "data.max_dropped_fraction 0.37; raise it, or set data.truncation to left or right, or raise "
        "data.max_dropped_fraction"
    )


def test_a_reached_limit_of_prompts_allows_any_fraction_of_dropped_ones() -> None:
    lines = [PromptLine(1, "toolong"), PromptLine(2, "too long"), PromptLine(3, "b")]
    assert len(encode(lines, PLAIN, max_prompt_tokens=5, max_dropped_fraction=0.0, limit=1).prompts) == 1
    with pytest.raises(DataError, match="2 of 3 are over"):
        encode(lines, PLAIN, max_prompt_tokens=5, max_dropped_fraction=0.0, limit=2)


def test_a_data_set_without_usable_prompts_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"all 2 of 2 are over data\.max_prompt_tokens 5 and would be dropped; raise it"
    ):
        encoded([PromptLine(n, "a" * 6) for n in (1, 2)], max_dropped_fraction=1.0)


@pytest.mark.parametrize(("truncation", "kept"), [("left", "cdefg"), ("right", "abcde")])
def test_long_prompts_are_truncated_on_either_side(truncation: str, kept: str) -> None:
    lines = [PromptLine(1, "abcdefg"), PromptLine(2, "abcde"), PromptLine(3, token_ids=tuple(range(1, 7)))]
    result = encoded(lines, truncation=truncation, max_dropped_fraction=0.0)
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [
        ids_of(kept),
        ids_of("abcde"),
        [2, 3, 4, 5, 6] if truncation == "left" else [1, 2, 3, 4, 5],
    ]
    assert result.notes == [f"2 of 3 prompts are over data.max_prompt_tokens 5 and truncated on the {truncation}"]


def test_truncation_on_the_left_keeps_the_bos_token() -> None:
    encoder = PromptEncoder("policies/a", lambda batch: [ids_of(f"^{text}") for text in batch], bos_id=ord("^"))
    (prompt,) = encode([PromptLine(1, "abcdefg")], encoder, max_prompt_tokens=3, truncation="left").prompts
    assert prompt.token_ids.tolist() == ids_of("^fg")


def test_truncated_prompts_count_towards_a_limit() -> None:
    lines = [PromptLine(1, "abcdef"), PromptLine(2, "b"), PromptLine(3, token_ids=(500,))]
    result = encode(lines, PLAIN, max_prompt_tokens=5, truncation="left", limit=2)
    assert [prompt.index for prompt in result.prompts] == [0, 1]


def test_a_final_eos_is_removed_from_text_but_not_from_token_ids() -> None:
    result = encoded([PromptLine(1, "ab$"), PromptLine(2, token_ids=(97, ord("$"))), PromptLine(3, "$")])
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [[97, 98], [97, ord("$")], [ord("$")]]
    assert result.notes == [
        "1 of 3 prompts ended with end-of-sequence tokens; they are taken off",
        "1 of 3 prompts are token_ids that end with an end-of-sequence token; they are used as they are, "
        "and the policy continues after the end",
    ]


def test_all_final_eos_tokens_of_a_text_are_removed_except_its_first_token() -> None:
    result = encoded([PromptLine(1, "ab$$$"), PromptLine(2, "a$b$"), PromptLine(3, "$$"), PromptLine(4, "c")])
    assert [prompt.token_ids.tolist() for prompt in result.prompts] == [
        ids_of(text) for text in ("ab", "a$b", "$", "c")
    ]
    assert result.notes == ["3 of 4 prompts ended with end-of-sequence tokens; they are taken off"]


def test_messages_that_end_with_an_eos_are_used_unchanged_and_counted() -> None:
    def closing(messages: list[dict[str, Any]], ending: str, *_: Any) -> str:
        return f"{messages[-1]['content']}{'' if ending == 'nothing' else '$'}"

    encoder = PromptEncoder("policies/a", texts, closing, texts)
    lines = [PromptLine(1, messages=(USER,)), PromptLine(2, token_ids=(7,)), PromptLine(3, messages=(USER,))]
    result = encode(lines, encoder, frozenset({ord("$")}), 128, 5)
    assert result.prompts[0].token_ids.tolist() == ids_of("hi$")
    assert result.notes[1:] == [
        "2 of 3 prompts are messages that end with an end-of-sequence token; they are used as they are, "
        "and the policy continues after the end"
    ]


def test_texts_with_two_bos_tokens_are_counted() -> None:
    encoder = PromptEncoder("policies/a", lambda batch: [ids_of(f"^{text}") for text in batch], bos_id=ord("^"))
    lines = [PromptLine(1, "^ab"), PromptLine(2, "ab"), PromptLine(3, "a^^"), PromptLine(4, token_ids=(94, 94, 1))]
    result = encode(lines, encoder, frozenset(), 128, 9)
    assert result.prompts[0].token_ids.tolist() == ids_of("^^ab")
    assert result.notes == [
        "1 of 4 prompts are text that begins with the beginning-of-sequence token twice; the tokenizer adds one, "
        "leave it out of the text"
    ]


def test_ids_outside_the_vocabulary_are_refused_with_their_line() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:4: token id 128; the policy's vocabulary is 0\.\.127"):
        encoded([PromptLine(1, "a"), PromptLine(4, token_ids=(1, 128))])
    with pytest.raises(DataError, match=r"p\.jsonl:4: token id -1; the policy's vocabulary is 0\.\.127"):
        encoded([PromptLine(4, token_ids=(1, -1))])


def test_a_prompt_without_tokens_is_refused_with_its_line() -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:2: the tokenizer makes no token of prompt"):
        encoded([PromptLine(1, "a"), PromptLine(2, "_")])


def test_a_limit_selects_the_first_usable_prompts_and_reads_no_further() -> None:
    lines = [PromptLine(1, "a"), PromptLine(2, "toolong"), PromptLine(3, "b"), PromptLine(4, token_ids=(500,))]
    result = encode(lines, PLAIN, frozenset(), 128, 5, limit=2)
    assert [prompt.index for prompt in result.prompts] == [0, 2]
    assert result.notes == [
        "warning: 1 of 3 prompts are over data.max_prompt_tokens 5 and dropped; raise it, or set data.truncation"
    ]


def test_a_large_file_is_tokenised_in_parts_while_it_is_read(tmp_path: Path) -> None:
    count = 2 * ENCODE_LINES + 3
    path = prompts_file(tmp_path, *(json.dumps({"text": f"{number}"}) for number in range(count)))
    batch_sizes: list[int] = []
    read = 0

    def counting() -> Iterator[PromptLine]:
        nonlocal read
        for line in iterate_prompt_lines(path):
            read += 1
            yield line

    def portion(batch: list[str]) -> list[list[int]]:
        assert read - sum(batch_sizes) == len(batch)
        batch_sizes.append(len(batch))
        return texts(batch)

    result = encode(counting(), PromptEncoder("m", portion), frozenset(), 128, 9)
    assert batch_sizes == [ENCODE_LINES, ENCODE_LINES, 3]
    assert [(p.index, p.text) for p in result.prompts] == [(number, f"{number}") for number in range(count)]
