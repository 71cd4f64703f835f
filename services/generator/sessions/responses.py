"""Responses of the OpenAI protocol: bodies, and the events of a stream.

A stream is written once its answer is complete and recorded, so its events follow each other at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.services.generator.sessions.protocol import Call, ChatCall, answer_message

EVENT_CHARACTERS = 1024
"""Characters of the text of an answer in one event of a stream."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer.

    ``content`` is the text, None beside tool calls or reasoning only. ``tool_calls`` are in OpenAI's shape. ``finish_reason`` is
    stop, length or tool_calls. ``tokens``: text and log-prob of each generated token, in nats, if the request asks for them.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[Mapping[str, Any], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    tokens: tuple[tuple[str, float], ...] | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message."""
        return answer_message(self.content, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True)
class Header:
    """Fields of a response that its parts share. ``name`` is the part of its id that is its own.

    ``session``: id of the session of a user, which an agent does not need.
    """

    name: str
    created: int
    model: str
    session: str = ""


def body_of(call: Call, header: Header, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the body of a response that is not a stream."""
    is_chat = isinstance(call, ChatCall)
    return {
        **_common(is_chat, header, "chat.completion" if is_chat else "text_completion"),
        "choices": [
            {
                "index": index,
                **({"message": choice.message} if is_chat else {"text": choice.content or ""}),
                "logprobs": _logprobs(is_chat, choice),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(call, choices),
    }


def events_of(call: Call, header: Header, choices: Sequence[Choice]) -> Iterator[bytes]:
    """Yield the server-sent events of a response."""
    is_chat = isinstance(call, ChatCall)
    common = _common(is_chat, header, "chat.completion.chunk" if is_chat else "text_completion")
    if call.include_usage:
        common["usage"] = None
    for index, choice in enumerate(choices):
        for part, logprobs, reason in _chat_parts(choice) if is_chat else _text_parts(choice):
            entry = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason}
            yield _event({**common, "choices": [entry]})
    if call.include_usage:
        yield _event({**common, "choices": [], "usage": _usage(call, choices)})
    yield b"data: [DONE]\n\n"


def models_of(model: str, created: int) -> dict[str, Any]:
    """Return the body of /v1/models."""
    return {"object": "list", "data": [model_of(model, created)]}


def model_of(model: str, created: int) -> dict[str, Any]:
    """Return the body of /v1/models/MODEL."""
    return {"id": model, "object": "model", "created": created, "owned_by": "quartet"}


_Part = tuple[dict[str, Any], dict[str, Any] | None, str | None]


def _chat_parts(choice: Choice) -> Iterator[_Part]:
    logprobs = _logprobs(True, choice)
    yield {"delta": {"role": "assistant", "content": ""}}, None, None
    for text in _pieces(choice.reasoning):
        yield {"delta": {"reasoning_content": text}}, None, None
    for text in _pieces(choice.content):
        # Tokens and pieces of the text have no common ends, so the first event has the log-probs of all.
        yield {"delta": {"content": text}}, logprobs, None
        logprobs = None
    for number, call in enumerate(choice.tool_calls):
        function = call["function"]
        start = {**call, "index": number, "function": {"name": function["name"], "arguments": ""}}
        yield {"delta": {"tool_calls": [start]}}, None, None
        for text in _pieces(function["arguments"]):
            yield {"delta": {"tool_calls": [{"index": number, "function": {"arguments": text}}]}}, None, None
    yield {"delta": {}}, logprobs, choice.finish_reason


def _text_parts(choice: Choice) -> Iterator[_Part]:
    logprobs = _logprobs(False, choice)
    for text in _pieces(choice.content):
        yield {"text": text}, logprobs, None
        logprobs = None
    yield {"text": ""}, logprobs, choice.finish_reason


def _pieces(text: str | None) -> Iterator[str]:
    for start in range(0, len(text or ""), EVENT_CHARACTERS):
        yield (text or "")[start : start + EVENT_CHARACTERS]


def _common(is_chat: bool, header: Header, kind: str) -> dict[str, Any]:
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{header.name}"
    common = {"id": name, "object": kind, "created": header.created, "model": header.model, "system_fingerprint": None}
    return common | ({"session_id": header.session} if header.session else {})


def _usage(call: Call, choices: Sequence[Choice]) -> dict[str, int]:
    # The prompt of several answers counts once.
    prompt = sum(choice.prompt_tokens for choice in choices[:: call.choices])
    completion = sum(choice.completion_tokens for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(is_chat: bool, choice: Choice) -> dict[str, Any] | None:
    if choice.tokens is None:
        return None
    if is_chat:
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
            for text, value in choice.tokens
        ]
        return {"content": content, "refusal": None}
    offsets = [0]
    for text, _ in choice.tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": [text for text, _ in choice.tokens],
        "token_logprobs": [value for _, value in choice.tokens],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"
