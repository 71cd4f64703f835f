"""Parameters of reward functions: Quartet's own, and those of functions that were written for TRL or verl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.rewards.response_texts import ScoredText

Arguments = tuple[list[Any], dict[str, Any]]
"""Positional and keyword arguments, as JSON values."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Way to call a function.

    ``arguments`` of one text, or of several if the function ``takes_lists``; it raises ValueError if a prompt line lacks a field.
    ``score_key``: key of the score if the function returns an object. ``may_decline``: None means that there is no score.
    """

    arguments: Callable[[Sequence[ScoredText]], Arguments]
    takes_lists: bool = False
    score_key: str | None = None
    may_decline: bool = False


def _quartet(texts: Sequence[ScoredText]) -> Arguments:
    [text] = texts
    return [text.prompt, text.response, text.fields], {}


def _batched(texts: Sequence[ScoredText]) -> Arguments:
    return [[text.prompt for text in texts], [text.response for text in texts], [text.fields for text in texts]], {}


_TRL_OWN = ("prompts", "completions", "completion_ids", "prompt", "completion")


def _trl(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments as the GRPOTrainer passes them: lists by keyword, and every column of the data set.

    A prompt line with ``messages`` is conversational: its prompt is the list of messages, its completion a list of one message.
    """
    columns = dict.fromkeys(name for text in texts for name in text.fields if name not in _TRL_OWN)
    return [], {
        **{name: [text.fields.get(name) for text in texts] for name in columns},
        "prompts": [_trl_prompt(text) for text in texts],
        "completions": [
            [{"role": "assistant", "content": text.response}] if _is_conversation(text) else text.response
            for text in texts
        ],
        "completion_ids": [text.token_ids[text.prompt_tokens :].tolist() for text in texts],
    }


def _is_conversation(text: ScoredText) -> bool:
    return isinstance(text.fields.get("messages"), list)


def _trl_prompt(text: ScoredText) -> Any:
    if _is_conversation(text):
        return text.fields["messages"]
    prompt = text.fields.get("prompt")
    return prompt if isinstance(prompt, str) else text.prompt


def _verl(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments as verl's reward managers pass them, by keyword, from the columns of its data sets."""
    [text] = texts
    truth = text.fields.get("ground_truth")
    model = text.fields.get("reward_model")
    if truth is None and isinstance(model, dict):
        truth = model.get("ground_truth")
    if truth is None:
        raise ValueError("the prompt's line has neither ground_truth nor reward_model.ground_truth")
    return [], {
        "data_source": text.fields.get("data_source"),
        "solution_str": text.response,
        "ground_truth": truth,
        "extra_info": text.fields.get("extra_info"),
    }


SIGNATURES = {
    "quartet": Signature(_quartet),
    "batched": Signature(_batched, takes_lists=True),
    "trl": Signature(_trl, takes_lists=True, may_decline=True),
    "verl": Signature(_verl, score_key="score"),
}
"""Every signature by its name in the config; "batched" is that of ``batched: true``."""
