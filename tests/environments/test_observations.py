"""Observations as token ids: the chat template's own tokens, encoded once."""

from __future__ import annotations

import json
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


DROPPING = [chats.DROPS_THOUGHTS, chats.DROPS_ALL_THOUGHTS, chats.DROPS_BEFORE_USER, chats.OPENS_THOUGHTS]
END = "<|im_end|>"


def served(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids that a server computes for the next turn of a chat: all of it, written at once."""
    return rendered(tokenizer, messages, True)


@pytest.mark.parametrize("template", DROPPING)
def test_a_template_that_changes_earlier_turns_writes_the_whole_chat_again(template: str) -> None:
    tokenizer = chats.tokenizer(template)
    encoder = ChatObservations(tokenizer, "test")
    assert not encoder.keeps_turns
    opens = "<think>\n" if template is chats.OPENS_THOUGHTS else ""
    prompt = rendered(tokenizer, [SYSTEM, USER], False)
    conversation = encoder.begin(np.array(prompt, np.int32))
    chat, tokens = [SYSTEM, USER], prompt + conversation.first("").observation.tolist()
    assert tokens == served(tokenizer, chat)
    for turn in ("One", "Two", "Three"):
        written = ("" if opens else "<think>\n") + f"on {turn}\n</think>\n\n{turn}"
        policy = ids(tokenizer, written + END)
        following = conversation.next(f"Answer to {turn}.", np.array(policy, np.int32))
        assert following.prompt is not None
        assert len(following.observation) == 0
        tokens = following.prompt.tolist()
        answer = {"role": "user", "content": f"Answer to {turn}."}
        chat += [{"role": "assistant", "content": opens + written}, answer]
        assert tokens == served(tokenizer, chat)
        text = tokenizer.decode(tokens)
        assert f"on {turn}" not in text
        assert text.startswith(tokenizer.decode(prompt))


def test_turns_that_such_a_template_keeps_continue_the_branch() -> None:
    tokenizer = chats.tokenizer(chats.DROPS_BEFORE_USER)
    prompt = rendered(tokenizer, [USER], False)
    conversation = ChatObservations(tokenizer, "test").begin(np.array(prompt, np.int32))
    chat, tokens = [USER], prompt + conversation.first("").observation.tolist()
    for turn in ("One", "Two"):
        policy = ids(tokenizer, f"<think>\non {turn}\n</think>\n\n{turn}" + END)
        result = {"role": "tool", "content": f"Result of {turn}."}
        following = conversation.next([result], np.array(policy, np.int32))
        assert following.prompt is None
        tokens += policy + following.observation.tolist()
        chat += [{"role": "assistant", "content": f"<think>\non {turn}\n</think>\n\n{turn}"}, result]
        assert tokens == served(tokenizer, chat)
    last = ids(tokenizer, "<think>\nso\n</think>\n\nDone." + END)
    following = conversation.next("Thanks.", np.array(last, np.int32))
    assert following.prompt is not None
    text = tokenizer.decode(following.prompt)
    assert "on One" not in text
    assert text.endswith("Done.<|im_end|>\n<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_that_the_template_writes_otherwise_is_never_continued() -> None:
    tokenizer = chats.tokenizer(chats.DROPS_ALL_THOUGHTS)
    conversation = ChatObservations(tokenizer, "test").begin(np.array([20], np.int32))
    conversation.first("Go.")
    # Without reasoning, the template writes what the policy wrote.
    kept = conversation.next("x", np.array(ids(tokenizer, "plain" + END), np.int32))
    assert (kept.prompt, len(kept.observation) > 0) == (None, True)
    assert conversation.next("x", np.array(ids(tokenizer, "a</think>b" + END), np.int32)).prompt is not None


def test_a_turn_that_was_cut_off_is_closed_in_a_branch_that_goes_on() -> None:
    tokenizer = chats.tokenizer(chats.DROPS_THOUGHTS)
    conversation = ChatObservations(tokenizer, "test").begin(np.array([20], np.int32))
    conversation.first("Go.")
    following = conversation.next("x", np.array(ids(tokenizer, "cut"), np.int32))
    assert tokenizer.decode(following.observation).startswith("<|im_end|>\n<|im_start|>user\nx")


def test_a_conversation_continues_from_its_state() -> None:
    tokenizer = chats.tokenizer(chats.DROPS_THOUGHTS)
    encoder = ChatObservations(tokenizer, "test")
    prompt = np.array(rendered(tokenizer, [USER], False), np.int32)
    turns = [np.array(ids(tokenizer, f"<think>\n{n}\n</think>\n\n{n}" + END), np.int32) for n in ("a", "b")]
    whole = encoder.begin(prompt)
    whole.first("First.")
    whole.next("Second.", turns[0])
    other = encoder.begin(prompt, json.loads(json.dumps(whole.state)))
    one, two = (conversation.next("Third.", turns[1]).prompt for conversation in (whole, other))
    assert one is not None
    assert two is not None
    assert one.tolist() == two.tolist()
    assert ChatObservations(chats.tokenizer(chats.CHATML), "test").begin(prompt).state is None


def test_a_chat_that_such_a_template_refuses_is_unusable() -> None:
    refuses = chats.DROPS_THOUGHTS.replace(
        "{% for", "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}{% for", 1
    )
    tokenizer = chats.tokenizer(refuses.replace("> 2", "> 3"))
    conversation = ChatObservations(tokenizer, "test").begin(np.array([20], np.int32))
    conversation.first("Go.")
    with pytest.raises(UnusableObservation, match="refuses messages of roles user"):
        conversation.next("x", np.array(ids(tokenizer, "a" + END), np.int32))


def test_a_template_that_does_not_write_turns_is_refused() -> None:
    silent = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ModelError, match="does not write a turn of the assistant once"):
        ChatObservations(chats.tokenizer(silent), "test")
    assert ChatObservations(chats.tokenizer(chats.DROPS_THOUGHTS), "test", chats.CHATML).keeps_turns


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
