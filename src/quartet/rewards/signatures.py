"""Parameters of reward functions: Quartet's own, and those of functions that were written for TRL, verl, OpenRLHF or slime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.rewards import TRL_NO_COLUMNS
from quartet.rewards.response_texts import ScoredText

Arguments = tuple[list[Any], dict[str, Any]]
"""Positional and keyword arguments, as JSON values."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Way to call a function.

    ``arguments`` of one text, or of several if the function ``takes_lists``; it raises ValueError if a prompt line lacks a field.
    ``score_key``: key of the score if the function returns an object. ``has_single_lists``: a list of one value in such an object
    is that value, and its ``extra_logs`` are logged. ``may_decline``: None and NaN mean that there is no score.
    ``takes_columns``: a parameter that is none of the arguments is a column of the prompts. ``counts_booleans``: True is 1.
    ``logs``: the function gets ``log_metric`` and ``log_extra``. ``objects``: arguments whose entries are attributes.
    ``settings``: position of the argument that has the arguments of the config; None: they are given by name.
    """

    arguments: Callable[[Sequence[ScoredText]], Arguments]
    takes_lists: bool = False
    score_key: str | None = None
    has_single_lists: bool = False
    may_decline: bool = False
    takes_columns: bool = False
    counts_booleans: bool = False
    logs: bool = False
    objects: tuple[str | int, ...] = ()
    settings: int | None = None


def _quartet(texts: Sequence[ScoredText]) -> Arguments:
    [text] = texts
    return [text.prompt, text.response, text.fields], {}


def _batched(texts: Sequence[ScoredText]) -> Arguments:
    return [[text.prompt for text in texts], [text.response for text in texts], [text.fields for text in texts]], {}


def _trl(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments as the GRPOTrainer passes them: lists by keyword, and every column of the data set.

    A prompt that is a list of messages is conversational: its completion is a list of one message.
    """
    columns = dict.fromkeys(name for text in texts for name in text.fields if name not in TRL_NO_COLUMNS)
    conversations = [_conversation(text) for text in texts]
    return [], {
        **{name: [text.fields.get(name) for text in texts] for name in columns},
        "prompts": [
            _plain_prompt(text) if talk is None else talk for text, talk in zip(texts, conversations, strict=True)
        ],
        "completions": [
            text.response if talk is None else [{"role": "assistant", "content": text.response}]
            for text, talk in zip(texts, conversations, strict=True)
        ],
        "completion_ids": [text.token_ids[text.prompt_tokens :].tolist() for text in texts],
        "trainer_state": {
            "global_step": max(text.updates for text in texts),
            "is_local_process_zero": True,
            "is_world_process_zero": True,
        },
    }


def _conversation(text: ScoredText) -> list[Any] | None:
    """Return the messages of a prompt, or None if it is a text."""
    for name in ("prompt", "messages"):
        if isinstance(value := text.fields.get(name), list):
            return value
    return None


def _plain_prompt(text: ScoredText) -> str:
    """Return the prompt as the data has it, without the special tokens that the policy sees."""
    for name in ("prompt", "text"):
        if isinstance(value := text.fields.get(name), str):
            return value
    return text.prompt


def _verl(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments as verl's reward managers pass them, by keyword, from the columns of its data sets."""
    [text] = texts
    extra = text.fields.get("extra_info")
    return [], {
        "data_source": text.fields.get("data_source"),
        "solution_str": text.response,
        "ground_truth": _truth(text.fields),
        # Two turns: the user's and the policy's.
        "extra_info": {**(extra if isinstance(extra, dict) else {}), "num_turns": 2, "rollout_reward_scores": {}},
    }


def _truth(fields: Mapping[str, Any]) -> Any:
    model = fields.get("reward_model")
    for holder in (fields, model if isinstance(model, dict) else {}):
        if holder.get("ground_truth") is not None:
            return holder["ground_truth"]
    if "ground_truth" in fields or (isinstance(model, dict) and "ground_truth" in model):
        return None
    raise ValueError("the prompt's line has neither ground_truth nor reward_model.ground_truth")


def _openrlhf(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments as OpenRLHF passes them to the reward_func of a file: lists of one response."""
    [text] = texts
    return [[text.query], [text.prompt], [text.fields.get("label", "")]], {}


def _slime(texts: Sequence[ScoredText]) -> Arguments:
    """Arguments of a custom_rm of slime: its settings, and a sample."""
    [text] = texts
    talk, metadata = _conversation(text), text.fields.get("metadata")
    return [
        {},
        {
            "prompt": _plain_prompt(text) if talk is None else talk,
            "response": text.response,
            "response_length": len(text.token_ids) - text.prompt_tokens,
            "tokens": text.token_ids.tolist(),
            "label": text.fields.get("label"),
            "metadata": metadata if isinstance(metadata, dict) else {},
            "reward": None,
        },
    ], {}


SIGNATURES = {
    "quartet": Signature(_quartet),
    "batched": Signature(_batched, takes_lists=True),
    "trl": Signature(
        _trl,
        takes_lists=True,
        may_decline=True,
        takes_columns=True,
        counts_booleans=True,
        logs=True,
        objects=("trainer_state",),
    ),
    "verl": Signature(_verl, score_key="score", counts_booleans=True),
    "openrlhf": Signature(_openrlhf, score_key="rewards", has_single_lists=True, counts_booleans=True),
    "slime": Signature(_slime, counts_booleans=True, objects=(0, 1), settings=0),
}
"""Every signature by its name in the config; "batched" is that of ``batched: true``."""
