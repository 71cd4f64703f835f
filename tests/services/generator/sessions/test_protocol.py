"""Requests of the OpenAI protocol: what is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quartet.services.generator.sessions.protocol import (
    COMPLETION_TOKENS,
    ChatCall,
    CompletionCall,
    ProtocolError,
    parse_chat,
    parse_completion,
)

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def chat(**fields: Any) -> ChatCall:
    model, call = parse_chat(json.dumps({"model": "run", "messages": [USER], **fields}).encode())
    assert model == "run"
    return call


def completion(**fields: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "run", "prompt": "once", **fields}).encode())[1]


def refused(fields: dict[str, Any], parse: Any = parse_chat) -> ProtocolError:
    base: dict[str, Any] = {"model": "run", "messages": [USER], "prompt": "once"}
    with pytest.raises(ProtocolError) as caught:
        parse(json.dumps({**base, **fields}).encode())
    return caught.value


def test_defaults_of_a_chat() -> None:
    call = chat()
    assert (call.choices, call.max_tokens, call.stop, call.logprobs, call.stream) == (1, None, (), False, False)
    assert (call.messages, call.tools, call.forced) == ((USER,), False, None)


def test_null_is_not_given() -> None:
    names = (
        "n",
        "stop",
        "stream",
        "logprobs",
        "tools",
        "tool_choice",
        "max_tokens",
        "stream_options",
        "response_format",
    )
    same = chat(**dict.fromkeys(names))
    assert (same.choices, same.stop, same.stream, same.logprobs, same.tools) == (1, (), False, False, False)


def test_the_smaller_limit_of_tokens_counts() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=7, max_tokens=9).max_tokens == 7
    assert completion().max_tokens == COMPLETION_TOKENS
    assert completion(max_tokens=3).max_tokens == 3


def test_stop_strings() -> None:
    assert chat(stop="a").stop == ("a",)
    assert chat(stop=["a", "", "b"]).stop == ("a", "b")


def test_settings_of_sampling_are_ignored() -> None:
    call = chat(temperature=0.1, top_p=0.5, seed=7, presence_penalty=1, service_tier="flex", metadata={"a": "b"})
    assert call.messages == chat().messages


def test_tools_reach_the_template_as_they_are() -> None:
    tool = {**TOOL, "function": {**TOOL["function"], "strict": None}}
    assert chat(tools=[tool]).inputs.tools == [tool]
    assert chat(tools=[TOOL]).tools
    hidden = chat(tools=[TOOL], tool_choice="none")
    assert (hidden.tools, hidden.inputs.tools) == (False, [TOOL])
    assert chat(tools=[TOOL], tool_choice="required").forced == ""
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.forced == "add"


def test_messages_are_written_for_templates() -> None:
    call = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "1+1?"}], "name": None},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "reasoning": "easy",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "2"},
            {"role": "assistant", "content": None},
        ]
    )
    system, user, assistant, tool, last = call.messages
    assert system == {"role": "system", "content": "be brief"}
    assert user == {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert assistant["reasoning_content"] == "easy"
    assert "refusal" not in assistant
    assert tool["tool_call_id"] == "c"
    assert last["content"] == ""


def test_the_digest_is_that_of_the_request_but_for_its_streaming() -> None:
    assert chat().digest == chat(stream=True, stream_options={"include_usage": True}).digest
    assert chat(n=2).digest != chat().digest
    assert chat(stop="x").digest != chat().digest
    a = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')[1]
    b = parse_chat(b'{"messages": [{"content": "x", "role": "user"}], "model": "m"}')[1]
    assert a.digest == b.digest


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_of_completions(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "x"}]}, "messages", "messages[0].role: missing"),
        ({"messages": [{"role": "user"}]}, "messages", "content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "reads text only"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [1]}]}, "messages", "tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}]},
            "messages",
            "not a JSON object",
        ),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stream": "perhaps"}, "stream", "boolean"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer, not '5'"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": 5}, "stop", "stop: Input should be a valid string or a valid list, not 5"),
        ({"stop": ["x", 5]}, "stop", "stop.1: Input should be a valid string, not 5"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "sampling settings of the run"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "set 0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "without a grammar"),
        ({"functions": [{"name": "f"}]}, "functions", "deprecated"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "'other'",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools", "tools.0.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice.function: missing"),
        ({"tool_choice": "zzz"}, "tool_choice", "should be 'none', 'auto' or 'required' or a valid object, not 'zzz'"),
        ({"chat_template": "{{ x }}"}, "chat_template", "remove it"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"continue_final_message": True}, "continue_final_message", "new message"),
        ({"model": None}, "model", "string"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_field(fields: dict[str, Any], param: str, text: str) -> None:
    error = refused(fields)
    assert error.status == 400
    assert text in error.message
    body = error.body["error"]
    assert (body["param"], body["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_what_completions_cannot_do_is_refused_with_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(fields, parse_completion)
    assert (error.status, error.param) == (400, param)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_chat(b'{"model": "run"}')
    assert caught.value.body["error"] == {
        "message": "messages: missing",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "missing_required_parameter",
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "m", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"1" * 5000 + b"}",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_a_malformed_body_is_refused(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ProtocolError) as caught:
            parse(body)
        assert caught.value.status == 400


def test_errors_do_not_repeat_long_values() -> None:
    assert len(refused({"stop": {"x" * 10_000: 1}}).message) < 400
