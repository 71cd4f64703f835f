"""Observations as token ids, each encoded once. The ids of a branch are those of its segments, concatenated."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
_OPENED_THOUGHT = re.compile(r"<think>\s*$")
"""End of a generation prompt that opens the reasoning, which the turn then only closes."""


class UnusableObservation(Exception):
    """An observation that cannot be encoded. The text quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens before the policy's next turn, int32 [tokens]: an observation in its branch, or the prompt of another branch."""

    observation: IntArray
    prompt: IntArray | None = None


class Conversation(Protocol):
    """The observations of one episode, in their order."""

    @property
    def state(self) -> Any:
        """What is needed to continue in another object, a JSON value. None if it is nothing."""

    def first(self, observation: str | Sequence[Message]) -> Continuation:
        """Return the ids between the prompt and the policy's first turn. Raises UnusableObservation."""

    def next(self, observation: str | Sequence[Message], turn_ids: IntArray) -> Continuation:
        """Return what follows a turn of the policy, int32 [tokens]. Raises UnusableObservation."""


class ObservationEncoder(Protocol):
    """Encoder of observations for one tokenizer."""

    def begin(self, prompt_ids: IntArray, state: Any = None) -> Conversation:
        """Begin an episode after ``prompt_ids``, int32 [tokens], or continue one with the ``state`` of its conversation."""

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        """Return the ids between the prompt and the policy's first turn, int32 [tokens]. Raises UnusableObservation."""

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        """Return the ids between a turn of the policy and its next, int32 [tokens]. ``last_id`` ends the turn.

        Raises UnusableObservation.
        """


class _Appended:
    """A conversation whose observations follow in the branch."""

    state: Any = None

    def __init__(self, encoder: ObservationEncoder) -> None:
        self._encoder = encoder

    def first(self, observation: str | Sequence[Message]) -> Continuation:
        return Continuation(self._encoder.first(observation))

    def next(self, observation: str | Sequence[Message], turn_ids: IntArray) -> Continuation:
        return Continuation(self._encoder.next(observation, int(turn_ids[-1])))


class TextObservations:
    """Plain text: the ids are those of the text, without special tokens around or in it.

    Text that looks like a special token, such as one that the policy wrote itself, is encoded as ordinary characters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begin(self, prompt_ids: IntArray, state: Any = None) -> Conversation:
        return _Appended(self)

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        return self.next(observation, 0)

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        if not isinstance(observation, str):
            raise UnusableObservation("returned messages; set environment.observations to chat, or return text")
        return _encoded(self._tokenizer, observation, split_special_tokens=True)


class ChatObservations:
    """Messages: the ids are those of the text that the chat template adds for them, up to the opening of the next turn.

    The text is the difference of two rendered chats: a short one that ends with a turn of the assistant, and the same one
    with the new messages. So it does not depend on the turns before, and nothing is encoded twice. ``keeps_turns`` is False for a
    template that changes earlier turns when new messages follow, such as one that drops their reasoning: see ``_Rewritten``.
    """

    def __init__(
        self, tokenizer: Any, name: str, template: str | None = None, inputs: TemplateInputs = NO_INPUTS
    ) -> None:
        """``name`` is that of the model. ``template`` replaces its chat template, which gets ``inputs`` as for the prompt.

        Raises ModelError without a template, and for one that does not write the turns.
        """
        self._tokenizer, self._name, self._inputs = tokenizer, name, inputs
        self._turns = TurnDecoder(tokenizer, keeps_special_tokens=True)
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
            self.keeps_turns = self._keeps_turns(opening)
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

    def begin(self, prompt_ids: IntArray, state: Any = None) -> Conversation:
        return _Appended(self) if self.keeps_turns else _Rewritten(self, prompt_ids, state)

    def first(self, observation: str | Sequence[Message]) -> IntArray:
        """Return the ids of the first observation. The prompt ends without the opening of a turn, which these ids include."""
        messages = _messages(observation)
        return self._ids(self._difference(self._first_opening, self._opening, messages))

    def next(self, observation: str | Sequence[Message], last_id: int) -> IntArray:
        messages = _messages(observation)
        return self._ids(self.missing_end(last_id) + self._difference(self._dialogue, self._rendered, messages))

    def missing_end(self, last_id: int) -> str:
        """Return the text that closes a turn which ends with ``last_id``."""
        closing, ended = self._closing, str(self._tokenizer.convert_ids_to_tokens(int(last_id)))
        # A turn that was cut off has no end-of-sequence token, but may end with the token's first characters. The observation
        # closes it.
        is_closed = last_id in self._closing_ids[:1] and closing.startswith(ended)
        return closing[len(ended) :] if is_closed else closing

    def _ids(self, text: str) -> IntArray:
        return _encoded(self._tokenizer, text)

    def _difference(self, before: list[Message], rendered: str, messages: list[Message]) -> str:
        """Return what the template appends to ``rendered``, the text of ``before``, for messages and the next turn."""
        after = self._written(before, messages)
        if not after.startswith(rendered):
            raise UnusableObservation(f"the chat template of {self._name} changes earlier turns for these messages")
        return after[len(rendered) :]

    def _written(self, before: list[Message], messages: list[Message], opens_turn: bool = True) -> str:
        """Return the text of a chat, up to the opening of the next turn if it ``opens_turn``. ``messages`` are the new ones."""
        try:
            return self._render([*before, *messages], opens_turn)
        except Exception as error:  # A template may raise anything.
            if problem := next(filter(None, map(content_problem, messages)), None):
                raise UnusableObservation(
                    f"returned a message that the chat template cannot write: {problem}"
                ) from None
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise UnusableObservation(
                f"the chat template of {self._name} refuses messages of roles {roles} ({type(error).__name__})"
            ) from None

    def answered(self, messages: list[Message], turn_ids: IntArray) -> list[Message]:
        """Return ``messages`` after the opening of the chat with a turn after them, which has the text of the tokens.

        Reasoning that the template has begun for the turn is between its tags.
        """
        opening = _OPENED_THOUGHT.search(self._written(self._first_opening, messages))
        content = (opening.group() if opening else "") + self._text_of(turn_ids)
        return [*messages, {"role": "assistant", "content": content}]

    def rewritten(self, answered: list[Message], new: list[Message], turn_ids: IntArray) -> Continuation:
        """Return what follows the last turn of ``answered``, which has these tokens, in a chat whose template may change it.

        The result has the tokens that follow in the branch if the template still writes what the branch has; otherwise, as the
        prompt, all tokens after the opening of the chat.
        """
        chat = [*self._first_opening, *answered]
        before, after = self._written(chat[:-1], chat[-1:], opens_turn=False), self._written(chat, new)
        opened, turn = self._written(chat[:-1], []), self._text_of(turn_ids).strip()
        is_whole = before.startswith(opened) and turn in before[len(opened) :] and before.endswith(self._closing)
        if is_whole and after.startswith(before):
            return Continuation(self._ids(self.missing_end(int(turn_ids[-1])) + after[len(before) :]))
        if not after.startswith(self._opening):
            raise UnusableObservation(f"the chat template of {self._name} changes the prompt for these messages")
        return Continuation(np.zeros(0, np.int32), self._ids(after[len(self._opening) :]))

    def _text_of(self, turn_ids: IntArray) -> str:
        """Return the text of a turn with its special tokens, but without the one that ends it."""
        last = int(turn_ids[-1])
        ends = self.missing_end(last) != self._closing or last in self._tokenizer.all_special_ids
        return self._turns.text(turn_ids[:-1] if ends else turn_ids)

    def _keeps_turns(self, opening: list[Message]) -> bool:
        """Return False for a template that rewrites a turn. Raises ModelError for one that does not write it."""
        thought = [*opening, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TURN}"}]
        reply: list[Message] = [{"role": "user", "content": "b"}]
        keeps = True
        for turns, text in ((self._dialogue, _TURN), (thought, _THOUGHT)):
            before, after = self._render(turns, False), self._render([*turns, *reply], True)
            if before.count(_TURN) != 1:
                raise ModelError(
                    f"environment.observations chat: the chat template of {self._name} does not write a turn of the assistant "
                    "once; set environment.chat_template to a file with another template"
                )
            keeps = keeps and text in before and after.startswith(before)
        return keeps

    def _render(self, messages: list[Message], opens_turn: bool) -> str:
        return self._template.render(messages, "generation prompt" if opens_turn else "nothing", self._inputs)


class _Rewritten:
    """A conversation whose chat template may change earlier turns: then the next turn begins a branch.

    Its prompt has the tokens of the prompt and of the whole chat after it, as the template writes it then.
    """

    def __init__(self, encoder: ChatObservations, prompt_ids: IntArray, state: Any) -> None:
        self._encoder, self._prompt_ids = encoder, prompt_ids
        self._messages: list[Message] = list(state or [])

    @property
    def state(self) -> Any:
        """The messages after the prompt."""
        return self._messages

    def first(self, observation: str | Sequence[Message]) -> Continuation:
        self._messages = _messages(observation)
        return Continuation(self._encoder.first(observation))

    def next(self, observation: str | Sequence[Message], turn_ids: IntArray) -> Continuation:
        answered, new = self._encoder.answered(self._messages, turn_ids), _messages(observation)
        result = self._encoder.rewritten(answered, new, turn_ids)
        self._messages = [*answered, *new]
        if result.prompt is None:
            return result
        return Continuation(result.observation, np.concatenate([self._prompt_ids, result.prompt]))


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
