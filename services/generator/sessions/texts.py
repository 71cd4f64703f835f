"""Texts of the policy: prompts from requests, answers from token ids, and what later requests may begin with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import FinishReason, TrajectoryId
from quartet.data.assistant_messages import answer_format, parse_answer
from quartet.data.chat_template import ChatTemplate, TemplateInputs
from quartet.engines.stop_strings import StopStrings, token_decoder
from quartet.services.generator.sessions.branching import Ending, Turn
from quartet.services.generator.sessions.protocol import (
    ROLES,
    Call,
    ChatCall,
    invalid,
    read_message,
    unsupported,
)
from quartet.services.generator.sessions.responses import Choice

_MARK = "QUARTET-ANSWER"
"""Text that marks the answer in a rendered chat."""
MAX_STOP_STRINGS_KEPT = 16
"""Number of combinations of stop strings whose tables are kept."""


class PolicyTexts:
    """Tokenizer and chat template of the policy. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        stop_ids: frozenset[int],
        inputs: TemplateInputs,
        template: str | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """``inputs``: what the config gives to the template, unless a request does. ``template`` replaces the tokenizer's.

        ``stop_strings``: those of the run.
        """
        self._tokenizer, self._vocabulary_size, self._stop_ids = tokenizer, vocabulary_size, stop_ids
        self._inputs, self._template, self._run_stops = inputs, ChatTemplate(tokenizer, template), tuple(stop_strings)
        own = template if template is not None else getattr(tokenizer, "chat_template", None)
        self._has_template = bool(own)
        self._format = answer_format(tokenizer, template)
        self._decode = token_decoder(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))
        """Length of the longest token in characters."""
        self._special = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._closing = self._closing_text() if self._has_template else ""
        self._closing_ids = self.encode(self._closing, False).tolist() if self._closing else []

    def encode(self, text: str, first: bool) -> IntArray:
        """Return the ids of a text, int32 [tokens]. ``first``: with what the tokenizer adds at the beginning of a sequence."""
        ids = self._tokenizer(text, add_special_tokens=first, return_attention_mask=False)["input_ids"]
        return self.checked(np.array(ids, np.int64), "the text of the request")

    def checked(self, ids: Any, what: str) -> IntArray:
        """Return ids as int32 [tokens]. Raises ProtocolError if there are none, or some that the policy does not have."""
        size = self._vocabulary_size
        if not len(ids) or ids.min() < 0 or ids.max() >= size:
            problem = f"token ids outside 0..{size - 1}" if len(ids) else "no tokens"
            raise invalid(f"{what} has {problem}")
        return np.asarray(ids, np.int32)

    def chat_prompt(self, call: ChatCall) -> str:
        """Return the messages of a request as text, up to the opening of the answer. Raises ProtocolError."""
        if not self._has_template:
            raise invalid(
                "messages: the policy's tokenizer has no chat template; set environment.chat_template to the file of one, or "
                "use /v1/completions",
                "messages",
            )
        forced = self._forced(call)
        try:
            return self._template.render(call.messages, "generation prompt", call.inputs.over(self._inputs)) + forced
        except Exception as error:  # A template may raise anything.
            reason = " ".join(str(error).split())[:200]
            roles = ", ".join(sorted({str(message["role"])[:20] for message in call.messages} - {*ROLES}))
            hint = f"; it may not know the role {roles}, expected {', '.join(ROLES)}" if roles else ""
            raise invalid(
                f"messages: the chat template refuses them ({type(error).__name__}: {reason}){hint}", "messages"
            ) from None

    def end_of(self, call: Call, ids: IntArray) -> int | None:
        """Return the number of ids up to the token that completes a stop string of the request; None if there is none."""
        return self._stops_of(call.stop).end_of(ids) if call.stop else None

    def choice(self, id: TrajectoryId, call: Call, prompt: str | None, turn: Turn) -> Choice:
        """Return an answer as a client gets it. ``prompt``: the text of a chat before it."""
        record, segment = turn.record, turn.record.segment
        ids = self._without_stop(segment.token_ids)
        text = self._before_stop(call, self._decode(ids))
        finish = "stop" if record.finish_reason is FinishReason.EOS else "length"
        content, reasoning = text, None
        calls: tuple[dict[str, Any], ...] = ()
        if isinstance(call, ChatCall):
            forced, tools = self._forced(call), call.inputs.tools or () if call.tools else ()
            answer = parse_answer(forced + text, self._format, (prompt or "").removesuffix(forced), tools)
            content, reasoning = answer.content, self._plain(answer.reasoning) or None
            calls = tuple(
                {
                    "id": _call_id(id, record.index, number),
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for number, each in enumerate(answer.tool_calls)
            )
            if calls and finish == "stop":
                finish = "tool_calls"
        tokens = None
        if call.logprobs:
            texts = (self._decode([token]) for token in segment.token_ids)
            tokens = tuple(zip(texts, segment.log_probs.tolist(), strict=True))
        # Null stands for a text that is missing, as beside calls, or after reasoning that was cut off.
        missing = not content and (calls or (reasoning and finish == "length"))
        return Choice(
            None if missing else self._plain(content),
            reasoning,
            calls,
            finish,
            turn.prompt_tokens,
            len(segment.token_ids),
            tokens,
        )

    def endings(self, call: Call, prompt: str | None, choice: Choice, ids: IntArray) -> list[Ending]:
        """Return what later requests may begin with after an answer with these ids. ``prompt``: the text before it, or None."""
        if prompt is None:
            return []
        # The text of the ids themselves.
        literal, own = Ending(prompt + self._decode(ids)), self._without_stop(ids)
        if not isinstance(call, ChatCall):
            return [literal, Ending(prompt + self._decode(own), len(ids) - len(own))]
        text = self._written(call, prompt, choice, self._decode(own))
        if text is None:
            return [literal]
        ended = str(self._tokenizer.convert_ids_to_tokens(int(ids[-1])))
        is_closed = ids[-1] in self._closing_ids[:1] and self._closing.startswith(ended)
        return [literal, Ending(text, closing=self._closing[len(ended) :] if is_closed else self._closing)]

    def _written(self, call: ChatCall, prompt: str, choice: Choice, generated: str) -> str | None:
        """Return the chat with the answer as the template writes it, if it differs from what was generated in spaces only.

        The format of tool calls may differ, too. None if the template leaves out or adds something, such as reasoning: the ids
        do not stand for its text then.
        """
        if choice.finish_reason == "length" and choice.content is None:
            # Cut off in the middle of the reasoning, which the template closes.
            return None
        messages = [*call.messages, read_message(choice.message, "answer")]
        try:
            text = self._template.render(messages, "nothing", call.inputs.over(self._inputs))
        except Exception:  # A template may raise anything. The next request then begins a branch.
            return None
        if not text.startswith(prompt) or not text.endswith(self._closing):
            return None
        forced = self._forced(call)
        written = _squeezed(text[len(prompt) - len(forced) :])
        wanted = _squeezed(forced + self._before_stop(call, generated))
        if choice.tool_calls:
            # What is before the name of the first call: reasoning and content at least.
            before = len(_squeezed((choice.reasoning or "") + (choice.content or "")))
            end = wanted.find(_squeezed(choice.tool_calls[0]["function"]["name"]), before)
            if end < 0:
                return None  # It is written otherwise, such as with escapes, so there is nothing to compare.
            wanted = wanted[:end]
        return text if written.startswith(wanted) else None

    def _before_stop(self, call: Call, text: str) -> str:
        """Return the text before the first stop string of the request or of the run."""
        starts = [start for string in (*call.stop, *self._run_stops) if (start := text.find(string)) >= 0]
        return text[: min(starts, default=len(text))]

    def _forced(self, call: ChatCall) -> str:
        """Return the beginning of a tool call with which a request begins the answer; "" if it leaves the choice to the policy.

        It is part of the prompt, so it is not trained. Raises ProtocolError if the format of the calls is not known.
        """
        if call.forced is None:
            return ""
        calls = self._format.template.get("fields", {}).get("tool_calls", {})
        if not (calls.get("open") and calls.get("close")) or calls.get("content") != "json":
            raise unsupported("tool_choice", "this policy decides itself whether it calls a tool; set auto or none")
        name = call.forced
        if not name and call.inputs.tools is not None and len(call.inputs.tools) == 1:
            name = call.inputs.tools[0]["function"]["name"]
        return f'{calls["open"]}\n{{"name": "' + (f'{name}", "arguments":' if name else "")

    def _closing_text(self) -> str:
        """Return the text with which the template closes an answer, such as "<|im_end|>\\n"; "" if it cannot be told."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        try:
            return self._template.render(chat, "nothing", self._inputs).partition(_MARK)[2]
        except Exception:  # A template may raise anything.
            return ""

    def _without_stop(self, ids: IntArray) -> IntArray:
        return ids[:-1] if int(ids[-1]) in self._stop_ids else ids

    def _plain(self, text: str) -> str:
        """Return a text without special tokens, which clients do not expect."""
        for token in self._special:
            text = text.replace(token, "")
        return text

    def _stops_of(self, strings: tuple[str, ...]) -> StopStrings:
        if (known := self._stops.get(strings)) is None:
            if len(self._stops) >= MAX_STOP_STRINGS_KEPT:
                self._stops.clear()
            known = self._stops[strings] = StopStrings(strings, self._decode, self._vocabulary_size)
        return known


def _call_id(id: TrajectoryId, turn: int, number: int) -> str:
    """Return the id of a tool call, the same whenever the answer is given again."""
    return f"call_{hashlib.blake2b(f'{id}/{turn}/{number}'.encode(), digest_size=12).hexdigest()}"


def _squeezed(text: str) -> str:
    """Return a text without spaces."""
    return "".join(text.split())
