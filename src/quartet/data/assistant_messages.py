"""Answers of the policy as messages of the assistant: content, reasoning and tool calls.

transformers parses them, by the response template of the tokenizer, or by that of the family that its chat template belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.data.chat_template import Message
from quartet.errors import ModelError

_NO_ANCHOR = "\0"
"""Beginning of a message in the text before its answer. It is never found: built-in templates get only the opening."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names that response templates give to the reasoning."""
_THINK = {"open": "<think>", "close": "</think>"}
_WHOLE = {"type": "function", "function": "{content}"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# What the chat template of a family contains, the field of its tool calls, and that of its reasoning. The first that fits counts.
_FAMILIES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (  # Qwen3-Coder and its successors
        "<function=",
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "repeats": True,
            "transform": _NAMED,
        },
        _THINK,
    ),
    (  # Hermes, Qwen2.5, Qwen3
        "<tool_call>",
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True, "transform": _WHOLE},
        _THINK,
    ),
    (  # Mistral, from its tokenizer 11 on
        "[ARGS]",
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\s]+)\[ARGS\]",
            "close_pattern": r"(?=\[TOOL_CALLS\])",
            "content": "json",
            "repeats": True,
            "transform": _NAMED,
        },
        {"open": "[THINK]", "close": "[/THINK]"},
    ),
    (  # Mistral before it: a list of calls
        "[TOOL_CALLS]",
        {"open": "[TOOL_CALLS]", "content": "json", "repeats": True, "transform": _WHOLE},
        {"open": "[THINK]", "close": "[/THINK]"},
    ),
    (  # Llama 3
        "<|python_tag|>",
        {
            "open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:)',
            "content": "json",
            "repeats": True,
            "transform": _WHOLE,
        },
        _THINK,
    ),
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AssistantAnswer:
    """An answer of the policy. ``reasoning`` is what it wrote as reasoning, "" for none."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the message as a chat template gets it: arguments of tool calls are objects."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in self.tool_calls
        ]
        return {
            "role": "assistant",
            "content": self.content,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of a policy are written: a response template of transformers, and ``parse_response`` of its tokenizer.

    ``is_own``: the template is the tokenizer's.
    """

    template: Mapping[str, Any]
    parse: Callable[..., Any]
    is_own: bool = False


def answer_format(tokenizer: Any, chat_template: str | None = None) -> AnswerFormat:
    """Return the format of the answers of a tokenizer's model. ``chat_template`` replaces its chat template.

    If neither the tokenizer has a response template nor the chat template is of a known family, reasoning is between think tags,
    and there are no tool calls. Raises ModelError for a response template that transformers refuses.
    """
    if own := getattr(tokenizer, "response_template", None):
        try:
            tokenizer.parse_response("", own, prefix="")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"response_template of the tokenizer: {error}; repair or remove it") from None
        return AnswerFormat(own, tokenizer.parse_response, is_own=True)
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    # A tokenizer may have several, by name.
    text = "\n".join(template.values()) if isinstance(template, dict) else template
    for marker, tool_calls, reasoning in _FAMILIES:
        if marker in text:
            return _format(tokenizer, {"tool_calls": tool_calls, "reasoning_content": reasoning})
    return _format(tokenizer, {"reasoning_content": _THINK})


def _format(tokenizer: Any, fields: dict[str, Any]) -> AnswerFormat:
    content = {"repeats": True, "content_args": {"strip": False}}
    template = {"start_anchor": _NO_ANCHOR, "fields": {**fields, "content": content}}
    return AnswerFormat(template, tokenizer.parse_response)


def parse_answer(
    text: str, format: AnswerFormat, prompt: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> AssistantAnswer:
    """Return the message in the text of an answer, which has no stop token.

    ``prompt``: the text before it, which may open the reasoning. Without ``tools``, JSON schemas as for the chat template, no
    tool is called. A call that cannot be parsed, such as one that was cut off, is content.
    """
    fields = {name: each for name, each in format.template["fields"].items() if tools or name != "tool_calls"}
    template = {**format.template, "fields": fields}
    prefix = prompt if format.is_own else _opening(prompt, fields)
    try:
        parsed = format.parse(text, template, prefix=prefix, tools=list(tools) or None)
        calls = tuple(_calls(parsed.get("tool_calls") or []))
    except (ValueError, KeyError, TypeError, RecursionError):
        # The policy has written no valid call. Its reasoning may still be separated.
        return parse_answer(text, format, prompt) if tools else AssistantAnswer(text)
    reasoning = next((parsed[name] for name in _REASONING if parsed.get(name)), "")
    content = parsed.get("content") or ""
    joined = "".join(content) if isinstance(content, list) else str(content)
    # Templates write line breaks between reasoning, content and calls.
    return AssistantAnswer(joined.strip() if reasoning or calls else joined, str(reasoning), calls)


def _opening(prompt: str, fields: Mapping[str, Any]) -> str:
    """Return the opening of the reasoning if a prompt ends with it."""
    opening: str = fields["reasoning_content"]["open"]
    return opening if prompt.rstrip().endswith(opening) else ""


def _calls(parsed: Any) -> Iterator[ToolCall]:
    """Yield the calls of a parsed answer, which are nested in lists for some families. Raises ValueError, KeyError, TypeError."""
    if isinstance(parsed, list):
        for each in parsed:
            yield from _calls(each)
        return
    function = parsed["function"] if isinstance(parsed.get("function"), (dict, list)) else parsed
    if isinstance(function, list):
        yield from _calls(function)
        return
    name, arguments = function["name"], function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a tool call has no name, or arguments that are no object")
    yield ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def template_message(message: Mapping[str, Any]) -> Message:
    """Return a message of an OpenAI client as a chat template gets it: arguments of tool calls are objects.

    Raises ValueError for arguments that are no JSON object.
    """
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"tool call {function.get('name')}: arguments are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
