"""Messages as text, written by a chat template. Every command and the environments of several turns use this module."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from quartet.config.root import Config
from quartet.config.template_inputs import TEMPLATE_KEYS, check_template_input
from quartet.data.prompt_files import parse_json

Message = dict[str, Any]
Ending = Literal["generation prompt", "open message", "nothing"]
"""End of a chat: a generation prompt, which opens the response; the last message without its end; or no addition."""
_MARK = "QUARTET-CONTENT"
"""Text that marks the content of a message in a rendered chat."""
_GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")
"""Tags of transformers around the turns of the assistant."""


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """Values that a chat template gets besides the messages. None: not given.

    ``tools`` are JSON schemas, ``documents`` objects such as {"title": ..., "text": ...}, and ``chat_template_kwargs`` further
    variables.
    """

    tools: Sequence[dict[str, Any]] | None = None
    documents: Sequence[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of_config(cls, config: Config) -> TemplateInputs:
        """Return the values of a config."""
        return cls.of_row({key: getattr(config.data, key) for key in TEMPLATE_KEYS})

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> TemplateInputs:
        """Return the values of a row, where each may be JSON as text. Raises ValueError that names the column.

        Null, and an empty text as in CSV, are not given.
        """
        given: dict[str, Any] = {}
        for key in TEMPLATE_KEYS:
            value = row.get(key)
            try:
                if isinstance(value, str) and value:
                    value = parse_json(value)
                if value is None or value == "":
                    continue
                check_template_input(key, value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{key}: {error}") from None
            given[key] = value if isinstance(value, dict) else list(value)
        return cls(**given)

    def over(self, defaults: TemplateInputs) -> TemplateInputs:
        """Return these values, and ``defaults`` for those that are not given. Variables are merged by name."""
        if self == NO_INPUTS:
            return defaults
        return TemplateInputs(
            defaults.tools if self.tools is None else self.tools,
            defaults.documents if self.documents is None else self.documents,
            {**(defaults.chat_template_kwargs or {}), **(self.chat_template_kwargs or {})},
        )

    @property
    def key(self) -> str:
        """Equal only for inputs with which every template writes the same, which may depend on the order of an object's keys."""
        return json.dumps([self.tools or None, self.documents or None, self.chat_template_kwargs or {}])


NO_INPUTS = TemplateInputs()


def content_problem(message: Mapping[str, Any]) -> str | None:
    """Return why the content of a message cannot be written by a template, or None.

    It is a text or a list of text parts. It may be null or missing beside tool calls.
    """
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return None
    if not isinstance(content, list):
        kind = "null" if content is None and "content" in message else f"of type {type(content).__name__}"
        problem = kind if "content" in message else "missing"
        return f"content is {problem}; expected a text or text parts (null only beside tool_calls)"
    for number, part in enumerate(content, 1):
        if not isinstance(part, dict):
            return f'content: part {number} is of type {type(part).__name__}; expected {{"type": "text", "text": ...}}'
        if part.get("type") != "text":
            name = part.get("type")
            shown = f"has the type {name[:40]}" if isinstance(name, str) else "has no type"
            return f"content: part {number} {shown}, but the policy reads text only; remove the part, or the row"
        if not isinstance(part.get("text"), str):
            return f"content: part {number}: text is missing or not a string"
    return None


class ChatTemplate:
    """The chat template of a tokenizer, or one in its place."""

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        """``tokenizer`` is from transformers. ``template`` replaces its chat template."""
        self._tokenizer, self._template = tokenizer, template

    def render(self, messages: Sequence[Message], ending: Ending, inputs: TemplateInputs = NO_INPUTS) -> str:
        """Return messages as text. Raises ValueError for parts that are not text, and whatever the template raises.

        Text parts reach a template that reads them. For another one they are joined by line breaks, as vLLM does. A template that
        reads only parts gets texts as parts. Content that is null beside tool calls is an empty text.
        """
        return self._write([self._readable(message) for message in messages], ending, inputs)

    def reads(self, variable: str) -> bool:
        """Return whether the template reads a variable. True for a template that is not in Jinja."""
        return self._variables is None or variable in self._variables

    def _write(self, messages: list[Message], ending: Ending, inputs: TemplateInputs) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages,
            # With tools, transformers may take another of a tokenizer's templates, so an empty list is none.
            tools=list(inputs.tools) if inputs.tools else None,
            documents=list(inputs.documents) if inputs.documents else None,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=ending == "generation prompt",
            continue_final_message=ending == "open message",
            **(inputs.chat_template_kwargs or {}),
        )
        return text

    def _readable(self, message: Message) -> Message:
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        reads_texts, reads_parts = self._reads
        if isinstance(content, str) and not reads_texts:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            if problem := content_problem(message):
                raise ValueError(problem)
            content = content if reads_parts else "\n".join(part["text"] for part in content)
        return {**message, "content": content}

    @cached_property
    def _variables(self) -> frozenset[str] | None:
        """Variables that the template reads, or any of a tokenizer that has several. None if they are not known."""
        from jinja2 import Environment, TemplateError, meta

        own: Any = getattr(self._tokenizer, "chat_template", None) if self._template is None else self._template
        # transformers adds these tags to the language. They read nothing.
        environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
        try:
            texts = [_GENERATION.sub("", text) for text in (own.values() if isinstance(own, dict) else [own])]
            parsed = [meta.find_undeclared_variables(environment.parse(text)) for text in texts]
        except (TemplateError, TypeError, RecursionError):
            return None
        return frozenset[str]().union(*parsed)

    @cached_property
    def _reads(self) -> tuple[bool, bool]:
        """True if the template writes content that is a text, and true if it writes a list of text parts."""
        text, parts = self._trial(_MARK), self._trial([{"type": "text", "text": _MARK}])
        # A template that does not read parts writes the list as Python or JSON, with the text in quotes, or fails.
        before = parts.partition(_MARK)[0][-1:]
        reads_parts = _MARK in parts and (parts == text or before not in ("'", '"'))
        return _MARK in text or not reads_parts, reads_parts

    def _trial(self, content: Any) -> str:
        try:
            return self._write([{"role": "user", "content": content}], "generation prompt", NO_INPUTS)
        except Exception:  # A template may raise anything.
            return ""
