"""Observations as token ids, each encoded once. The ids of a trajectory are those of its segments, concatenated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.data.chat_template import NO_INPUTS, ChatTemplate, TemplateInputs, content_problem
from quartet.environments.environment import Message
from quartet.errors import InvalidRequest, ModelError

MAX_OBSERVATION_CHARACTERS = 1_000_000
"""Maximum length of the text of one observation."""
MAX_ENCODERS = 64
"""Maximum number of encoders that are kept. Each has two short chats."""
_TURN, _THOUGHT = "QUARTET-TURN", "QUARTET-THOUGHT"
"""Texts that mark a place in a rendered chat."""


class UnusableObservation(Exception):
    """An observation that cannot be encoded. The text quotes nothing of it."""


class ObservationEncoder(Protocol):
    """Encoder of observations for one tokenizer."""

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        """Return the ids between the prompt and the policy's first turn, int32 [tokens]. Raises UnusableObservation."""

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        """Return the ids between a turn of the policy and its next, int32 [tokens]. ``last_id`` ends the turn.

        Raises UnusableObservation.
        """


class TextObservations:
    """Plain text: the ids are those of the text, without special tokens around or in it.

    Text that looks like a special token, such as one that the policy wrote itself, is encoded as ordinary characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        return self.next(observation, 0)

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        if not isinstance(observation, str):
            raise UnusableObservation("returned messages; set environment.observations to chat, or return text")
        return _encoded(self._tokenizer, observation, split_special_tokens=True)


class ChatObservations:
    """Messages: the ids are those of the text that the chat template adds for them, up to the opening of the next turn.

    The text is the difference of two rendered chats: a short one that ends with a turn of the assistant, and the same one
    with the new messages. So it does not depend on the turns before, and nothing is encoded twice.
    """

    def __init__(
        self, tokenizer: Any, name: str, template: str | None = None, inputs: TemplateInputs = NO_INPUTS
    ) -> None:
        """``name`` is that of the model. ``template`` replaces its chat template, which gets ``inputs`` as for the prompt.

        Raises ModelError without a template, and for one that changes earlier turns when new messages follow.
        """
        self._tokenizer, self._name, self._inputs = tokenizer, name, inputs
        self._template = ChatTemplate(tokenizer, template)
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                f"environment.observations chat: the tokenizer of {name} has no chat template; set environment.chat_template to "
                "the file of one, or observations text"
            )
        opening: list[Message] = [{"role": "user", "content": "a"}]
        self._dialogue = [*opening, {"role": "assistant", "content": _TURN}]
        try:
            self._opening, self._rendered = self._render(opening, False), self._render(self._dialogue, False)
            self._check_turns_are_kept(opening)
        except ModelError:
            raise
        except Exception as error:  # A template may raise anything.
            raise ModelError(
                f"environment.observations chat: the chat template of {name} refuses a user's and an assistant's message "
                f"({type(error).__name__}); set environment.chat_template, or observations text"
            ) from None
        # Text with which the template closes a turn, such as "<|im_end|>\n".
        self._closing = self._rendered.partition(_TURN)[2]
        self._closing_ids = self._ids(self._closing)
        self._first_opening = opening

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        """Return the ids of the first observation. The prompt ends without the opening of a turn, which these ids include."""
        messages = _messages(observation)
        return self._ids(self._difference(self._first_opening, self._opening, messages))

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        messages = _messages(observation)
        closing, ended = self._closing, str(self._tokenizer.convert_ids_to_tokens(int(last_id)))
        # A turn that was cut off has no end-of-sequence token, but may end with the token's first characters. The observation
        # closes it.
        is_closed = last_id in self._closing_ids[:1] and closing.startswith(ended)
        missing = closing[len(ended) :] if is_closed else closing
        return self._ids(missing + self._difference(self._dialogue, self._rendered, messages))

    def _ids(self, text: str) -> IntArray:
        return _encoded(self._tokenizer, text)

    def _difference(self, before: list[Message], rendered: str, messages: list[Message]) -> str:
        """Return what the template appends to ``rendered``, the text of ``before``, for messages and the next turn."""
        try:
            after = self._render([*before, *messages], True)
        except Exception as error:  # A template may raise anything.
            if problem := next(filter(None, map(content_problem, messages)), None):
                raise UnusableObservation(
                    f"returned a message that the chat template cannot write: {problem}"
                ) from None
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UnusableObservation(
                f"the chat template of {self._name} refuses messages of roles {roles} ({type(error).__name__})"
            ) from None
        if not after.startswith(rendered):
            raise UnusableObservation(f"the chat template of {self._name} changes earlier turns for these messages")
        return after[len(rendered) :]

    def _check_turns_are_kept(self, opening: list[Message]) -> None:
        """Raise ModelError for a template that rewrites a turn, such as one that drops the reasoning of earlier turns."""
        thought = [*opening, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TURN}"}]
        reply: list[Message] = [{"role": "user", "content": "b"}]
        for turns, text in ((self._dialogue, _TURN), (thought, _THOUGHT)):
            before, after = self._render(turns, False), self._render([*turns, *reply], True)
            if before.count(_TURN) != 1 or text not in before or not after.startswith(before):
                raise ModelError(
                    f"environment.observations chat: the chat template of {self._name} changes earlier turns when a message "
                    "follows, such as by dropping their reasoning, so a trajectory's tokens would not be those that the model "
                    "generated; set environment.chat_template to a file with a template that keeps them"
                )

    def _render(self, messages: list[Message], opens_turn: bool) -> str:
        return self._template.render(messages, "generation prompt" if opens_turn else "nothing", self._inputs)


class ObservationEncoders:
    """The encoders of ``environment.observations``, text or chat: one for each content that the chat template gets."""

    def __init__(
        self, tokenizer: Any, name: str, observations: str, template: str | None, inputs: TemplateInputs = NO_INPUTS
    ) -> None:
        """``inputs`` are those of the config. Raises ModelError if the template cannot be used with them."""
        self._inputs = inputs
        self._text = None if observations == "chat" else TextObservations(tokenizer)
        self._of_key = lru_cache(MAX_ENCODERS)(
            lambda key: ChatObservations(tokenizer, name, template, TemplateInputs(*json.loads(key)))
        )
        if self._text is None:
            self._of_key(inputs.key)

    def of_prompt(self, fields: Mapping[str, Any]) -> ObservationEncoder:
        """Return the encoder for a prompt with these fields. Raises UnusableObservation."""
        if self._text is not None:
            return self._text
        # Like the prompt: only messages go through the template.
        is_chat = any(isinstance(fields.get(key), list) for key in ("messages", "prompt"))
        try:
            inputs = TemplateInputs.of_row(fields) if is_chat else NO_INPUTS
            return self._of_key(inputs.over(self._inputs).key)
        except (ValueError, ModelError) as error:
            raise UnusableObservation(str(error)) from None


def _messages(observation: str | Sequence[Message]) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return list(observation)


def _encoded(tokenizer: Any, text: str, split_special_tokens: bool = False) -> IntArray:
    if len(text) > MAX_OBSERVATION_CHARACTERS:
        raise UnusableObservation(f"returned {len(text)} characters; the limit is {MAX_OBSERVATION_CHARACTERS}")
    if not text:
        return np.zeros(0, np.int32)
    ids = tokenizer(
        text, add_special_tokens=False, return_attention_mask=False, split_special_tokens=split_special_tokens
    )["input_ids"]
    return np.array(ids, np.int32)


class TurnDecoder:
    """The text of the policy's turns, for environments."""

    def __init__(self, tokenizer: Any, keeps_special_tokens: bool) -> None:
        self._tokenizer, self._keeps = tokenizer, keeps_special_tokens
        known = np.fromiter(tokenizer.get_vocab().values(), np.int64)
        self._known = np.zeros(int(known.max()) + 1, np.bool_)
        self._known[known] = True

    def text(self, token_ids: IntArray) -> str:
        """Return the text of a turn. A token that the tokenizer does not know has no text. Raises InvalidRequest."""
        if token_ids.min() < 0:
            raise InvalidRequest(f"token_ids: got {token_ids.min()}, expected 0 or more")
        inside = token_ids[token_ids < len(self._known)]
        known = inside[self._known[inside]].tolist()
        # No clean-up of spaces: an environment that compares texts needs the exact text.
        return str(
            self._tokenizer.decode(known, skip_special_tokens=not self._keeps, clean_up_tokenization_spaces=False)
        )
