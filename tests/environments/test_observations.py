"""Observations as token ids: the chat template's own tokens, encoded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quartet.contract.arrays import IntArray
from quartet.data.chat_template import TemplateInputs
from quartet.environments.observations import (
    ChatObservations,
    ObservationEncoders,
    TextObservations,
    UnusableObservation,
)
from quartet.errors import ModelError
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


SWITCH = chats.CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}",
)
"""A template that opens turns without reasoning if a variable says so."""
TOOLS_LATE = """{% for message in messages %}{% if tools and loop.last and message.role == 'user' %}[{{ tools | tojson }}]{%
endif %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{%
endif %}"""
"""A template that writes the tools before the last message of the user."""


def test_turns_get_what_the_prompt_gets_from_the_row_or_the_config() -> None:
    tokenizer = chats.tokenizer(SWITCH)
    config = TemplateInputs(chat_template_kwargs={"enable_thinking": False})
    encoders = ObservationEncoders(tokenizer, "test", "chat", None, config)
    end = ids(tokenizer, "<|im_end|>")[0]
    rows: list[tuple[dict[str, object], str]] = [
        ({"messages": [USER]}, "<think></think>"),
        ({"prompt": [USER], "chat_template_kwargs": {"enable_thinking": True}}, ""),
        ({"messages": [USER], "chat_template_kwargs": '{"enable_thinking": true}'}, ""),
        ({"prompt": "text", "chat_template_kwargs": {"enable_thinking": True}}, "<think></think>"),
    ]
    for fields, opening in rows:
        encoder = encoders.of_prompt(fields)
        for encoded in (encoder.first("x"), encoder.next("x", end)):
            assert tokenizer.decode(encoded).endswith(
                f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{opening}"
            )
    assert encoders.of_prompt(rows[0][0]) is encoders.of_prompt({"messages": [SYSTEM]})


def test_tools_of_a_row_that_change_earlier_turns_are_unusable() -> None:
    encoders = ObservationEncoders(chats.tokenizer(TOOLS_LATE), "test", "chat", None)
    assert len(encoders.of_prompt({"messages": [USER]}).first("x"))
    with pytest.raises(UnusableObservation, match="changes earlier turns"):
        encoders.of_prompt({"messages": [USER], "tools": [{"type": "function"}]}).first("x")
    with pytest.raises(UnusableObservation, match="tools: is of type int; expected a list"):
        encoders.of_prompt({"messages": [USER], "tools": 5})


def test_text_parts_of_observations_are_written_and_others_refused() -> None:
    tokenizer = chats.tokenizer(chats.CHATML)
    encoder = ChatObservations(tokenizer, "test")
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    assert encoder.next([parts], 0).tolist() == encoder.next("x", 0).tolist()
    with pytest.raises(UnusableObservation, match="content: part 1 has the type image, but the policy reads text only"):
        encoder.next([{"role": "user", "content": [{"type": "image"}]}], 0)


def test_a_missing_template_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has no chat template; set environment\.chat_template"):
        ObservationEncoders(chats.tokenizer(), "test", "chat", None)


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
    encoder = ObservationEncoders(tokenizer, "test", "text", None).of_prompt({})
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
