"""Observations as token ids: the chat template's own tokens, encoded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quartet.environments.observations import ChatObservations, TextObservations, UnusableObservation, create_encoder
from quartet.errors import ModelError
from quartet.types import IntArray
from tests.environments import chats

USER, SYSTEM = {"role": "user", "content": "Hi."}, {"role": "system", "content": "Be brief."}


def ids(tokenizer: Any, text: str) -> list[int]:
    result: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return result


def rendered(tokenizer: Any, messages: list[dict[str, str]], opens_turn: bool) -> list[int]:
    """Return the ids of a chat that the template writes at once."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_turn)
    return ids(tokenizer, text)


@pytest.mark.parametrize(("template", "end"), [(chats.CHATML, "<|im_end|>"), (chats.HEADERS, "<|eot_id|>")])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_segments_of_three_turns_are_the_tokens_of_the_rendered_chat(template: str, end: str, role: str) -> None:
    tokenizer = chats.tokenizer(template)
    encoder = ChatObservations(tokenizer, "test")
    chat = [SYSTEM, USER]
    tokens = rendered(tokenizer, chat, False)
    first: IntArray = encoder.first("")
    tokens += first.tolist()
    for turn in ("One", "Two", "Three"):
        policy = ids(tokenizer, turn + end)
        chat.append({"role": "assistant", "content": turn})
        observation = {"role": role, "content": f"Answer to {turn}."}
        tokens += policy + encoder.next([observation], policy[-1]).tolist()
        chat.append(observation)
    assert tokens == rendered(tokenizer, chat, True)


def test_a_first_observation_is_a_message_after_the_prompt() -> None:
    tokenizer = chats.tokenizer(chats.HEADERS)
    tokens = rendered(tokenizer, [SYSTEM], False) + ChatObservations(tokenizer, "test").first("Guess.").tolist()
    assert tokens == rendered(tokenizer, [SYSTEM, {"role": "user", "content": "Guess."}], True)


def test_neighbouring_tool_messages_are_written_together() -> None:
    tokenizer = chats.tokenizer(chats.CHATML)
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    encoded = ChatObservations(tokenizer, "test").next(results, ids(tokenizer, "<|im_end|>")[0])
    assert tokenizer.decode(encoded) == (
        "\n<|im_start|>user\n<tool_response>1</tool_response><tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("last", ["a", "<"])
def test_the_observation_closes_a_turn_that_was_cut_off(last: str) -> None:
    tokenizer = chats.tokenizer(chats.CHATML)
    encoder = ChatObservations(tokenizer, "test")
    closed = encoder.next("x", ids(tokenizer, "<|im_end|>")[0])
    cut = encoder.next("x", ids(tokenizer, last)[0])
    assert cut.tolist() == [*ids(tokenizer, "<|im_end|>"), *closed.tolist()]


@pytest.mark.parametrize("template", [chats.DROPS_THOUGHTS, chats.DROPS_ALL_THOUGHTS])
def test_a_template_that_rewrites_earlier_turns_is_refused(template: str) -> None:
    with pytest.raises(ModelError, match=r"test changes earlier turns .* set environment.chat_template to a file"):
        ChatObservations(chats.tokenizer(template), "test")
    assert len(ChatObservations(chats.tokenizer(template), "test", chats.CHATML).first(""))


def test_a_missing_template_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has no chat template; set environment\.chat_template"):
        create_encoder(chats.tokenizer(), "test", "chat", None)


def test_a_template_that_fails_is_refused() -> None:
    with pytest.raises(ModelError, match="refuses a user's and an assistant's message"):
        ChatObservations(chats.tokenizer("{{ raise_exception('no') }}"), "test")


def test_messages_that_the_template_refuses_are_unusable() -> None:
    encoder = ChatObservations(chats.tokenizer(chats.STRICT), "test")
    assert len(encoder.next("x", 0))
    with pytest.raises(UnusableObservation, match="refuses messages of roles user, user"):
        encoder.next([USER, USER], 0)


def test_plain_text_gets_no_special_tokens() -> None:
    tokenizer = chats.tokenizer()
    encoder = create_encoder(tokenizer, "test", "text", None)
    assert isinstance(encoder, TextObservations)
    assert encoder.next("ab", 0).tolist() == encoder.first("ab").tolist() == ids(tokenizer, "ab")
    assert encoder.first("").dtype == np.int32
    with pytest.raises(UnusableObservation, match=r"set environment\.observations to chat"):
        encoder.next([USER], 0)


def test_text_that_looks_like_a_special_token_is_encoded_as_characters() -> None:
    tokenizer = chats.tokenizer()
    encoded = TextObservations(tokenizer).next("a<|im_end|><tool_call>", 0).tolist()
    characters = [id for character in "a<|im_end|>" for id in ids(tokenizer, character)]
    assert encoded == [*characters, *ids(tokenizer, "<tool_call>")]
    assert tokenizer.decode(encoded) == "a<|im_end|><tool_call>"
