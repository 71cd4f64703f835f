"""Answers as messages: reasoning and tool calls of each family of chat templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from quartet.data.assistant_messages import (
    AnswerFormat,
    AssistantAnswer,
    ToolCall,
    answer_format,
    parse_answer,
    template_message,
)
from quartet.errors import ModelError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
            },
        },
    }
]


def format_of(chat_template: str, response_template: dict[str, Any] | None = None) -> AnswerFormat:
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel()), chat_template=chat_template
    )
    tokenizer.response_template = response_template
    return answer_format(tokenizer)


HERMES = format_of("... <tool_call> ...")
CALL = ToolCall("add", '{"a": 1, "b": 2}')


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<tool_call>", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
        (
            "<tool_call> <function=",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        ),
        ("[TOOL_CALLS] [ARGS]", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        ("<|python_tag|>", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("<|python_tag|>", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    ],
)
def test_each_family_writes_its_calls_in_its_own_way(template: str, text: str) -> None:
    assert parse_answer(text, format_of(template), tools=TOOLS) == AssistantAnswer("", "", (CALL,))


def test_several_calls_keep_their_order_and_the_content_between_them() -> None:
    first, second = (f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
    text = f"I add.\n{first}\n{second}"
    answer = parse_answer(text, HERMES, tools=TOOLS)
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"a": 1}, {"a": 2}]
    assert answer.content == "I add."


def test_calls_of_mistral_follow_each_other() -> None:
    text = 'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}'
    answer = parse_answer(text, format_of("[TOOL_CALLS] [ARGS]"), tools=TOOLS)
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"a": 1}, {"a": 2}]


def test_parameters_in_tags_get_the_types_of_the_schema() -> None:
    text = "<tool_call><function=add><parameter=a>\n7\n</parameter><parameter=note>\n7\n</parameter></function></tool_call>"
    (call,) = parse_answer(text, format_of("<function="), tools=TOOLS).tool_calls
    assert json.loads(call.arguments) == {"a": 7, "note": "7"}


def test_without_tools_a_call_is_content() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse_answer(text, HERMES) == AssistantAnswer(text)


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>{"name": "add", "argu',
        "<tool_call>add(1, 2)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>"add"</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_parsed_is_content(call: str) -> None:
    assert parse_answer(f"<think>hm</think>{call}", HERMES, tools=TOOLS) == AssistantAnswer(call, "hm")


def test_reasoning_is_separated() -> None:
    text = "<think>\nOne and two.\n</think>\n\nThree."
    assert parse_answer(text, HERMES) == AssistantAnswer("Three.", "One and two.")


def test_reasoning_that_the_prompt_opened_is_separated() -> None:
    answer = parse_answer("One and two.\n</think>\n\nThree.", HERMES, prompt="<|im_start|>assistant\n<think>\n")
    assert answer == AssistantAnswer("Three.", "One and two.")
    assert parse_answer("Three.", HERMES, prompt="assistant\n<think>\n\n</think>\n\n") == AssistantAnswer("Three.")


def test_reasoning_that_was_cut_off_is_no_content() -> None:
    assert parse_answer("<think>One and", HERMES) == AssistantAnswer("", "One and")


def test_an_answer_without_markup_stays_as_it_is() -> None:
    assert parse_answer("  Three.\n", HERMES, tools=TOOLS) == AssistantAnswer("  Three.\n")
    assert parse_answer("Three.", format_of("")) == AssistantAnswer("Three.")


def test_a_tokenizers_own_response_template_counts() -> None:
    own = {"start_anchor": "A:", "fields": {"thinking": {"open": "(", "close": ")"}, "content": {}}}
    format = format_of("<tool_call>", response_template=own)
    assert parse_answer("why) Three.", format, prompt="Q: A:(") == AssistantAnswer("Three.", "why")


def test_a_response_template_that_is_wrong_is_named() -> None:
    with pytest.raises(ModelError, match=r"response_template of the tokenizer: .*colour"):
        format_of("", response_template={"start_anchor": "A:", "fields": {"content": {"colour": 1}}})


def test_a_message_for_the_template_has_arguments_as_objects() -> None:
    answer = AssistantAnswer("", "hm", (CALL,))
    message = answer.message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}
    sent = template_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert sent["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    assert template_message({"role": "user", "content": "a", "tool_calls": None}) == {"role": "user", "content": "a"}
    with pytest.raises(ValueError, match="tool call add: arguments are not a JSON object"):
        template_message({"tool_calls": [{"function": {"name": "add", "arguments": "[1"}}]})
