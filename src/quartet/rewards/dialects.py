"""Dialects of scorers over HTTP: their requests, and the strict reading of their responses.

The formats are those of OpenRLHF (`--reward.remote_url`), slime (`--rm-url`), vLLM (`/classify`), SGLang (`/v1/embeddings` of a
reward model) and NeMo-Gym (`/verify` of a resources server).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.config.rewards import HttpRewardConfig
from quartet.contract.logged_values import cleaned
from quartet.rewards.response_texts import ScoredText
from quartet.rewards.reward_source import Score, is_score, shown

Request = Callable[[Sequence[ScoredText], HttpRewardConfig], Any]
"""Function that builds the body of a request."""
Reading = Callable[[Any, int, HttpRewardConfig], list[float]]
"""Function that reads one score per text. Raises ValueError with a reason that quotes no text."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect. ``path`` is added to the address. ``single``: a request takes one text."""

    request: Request
    scores: Reading
    path: str = ""
    single: bool = False


def _openrlhf(texts: Sequence[ScoredText], config: HttpRewardConfig) -> Any:
    return {
        "query": [text.query for text in texts],
        "prompts": [text.prompt for text in texts],
        "labels": [text.fields.get(config.label_field, "") for text in texts],
    }


def _openrlhf_scores(answer: Any, count: int, config: HttpRewardConfig) -> list[float]:
    scores = _numbers(_value(answer, config.reward_key or "rewards"), count)
    logs = answer.get("extra_logs")
    columns = logs if isinstance(logs, dict) else {}
    # Logs that are not one value for each response decide nothing: they are left out.
    rows = [
        {name: column[index] for name, column in columns.items() if isinstance(column, list) and len(column) == count}
        for index in range(count)
    ]
    return [Score(score, cleaned(row)) for score, row in zip(scores, rows, strict=True)] if columns else scores


def _slime(texts: Sequence[ScoredText], config: HttpRewardConfig) -> Any:
    [text] = texts
    return {"prompt": text.prompt, "response": text.response, "label": text.fields.get(config.label_field)}


def _slime_scores(answer: Any, count: int, config: HttpRewardConfig) -> list[float]:
    if config.reward_key is None and isinstance(answer, dict):
        raise ValueError(
            f"the score is {shown(answer)}, expected a finite number; set reward_key to the key of the score"
        )
    return _numbers([answer if config.reward_key is None else _value(answer, config.reward_key)], 1)


def _classify(texts: Sequence[ScoredText], config: HttpRewardConfig) -> Any:
    return {"model": config.model, "input": _inputs(texts), "use_activation": False}


def _classify_scores(answer: Any, count: int, config: HttpRewardConfig) -> list[float]:
    return _last_numbers(answer, count, "probs")


def _embeddings(texts: Sequence[ScoredText], config: HttpRewardConfig) -> Any:
    return {"model": config.model, "input": _inputs(texts)}


def _embeddings_scores(answer: Any, count: int, config: HttpRewardConfig) -> list[float]:
    return _last_numbers(answer, count, "embedding")


def _verify(texts: Sequence[ScoredText], config: HttpRewardConfig) -> Any:
    [text] = texts
    message = {
        "id": "msg_0",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text.response, "annotations": []}],
    }
    response = {
        "id": "resp_0",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "status": "completed",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    parameters = {"input": [{"role": "user", "content": text.prompt}]}
    return {"responses_create_params": parameters, **text.fields, "response": response}


def _verify_scores(answer: Any, count: int, config: HttpRewardConfig) -> list[float]:
    return _numbers([_value(answer, config.reward_key or "reward")], 1)


DIALECTS = {
    "openrlhf": Dialect(_openrlhf, _openrlhf_scores),
    "slime": Dialect(_slime, _slime_scores, single=True),
    "vllm-classify": Dialect(_classify, _classify_scores, "/classify"),
    "sglang-embeddings": Dialect(_embeddings, _embeddings_scores, "/v1/embeddings"),
    "nemo-gym": Dialect(_verify, _verify_scores, "/verify", single=True),
}


def _inputs(texts: Sequence[ScoredText]) -> Any:
    queries = [text.query for text in texts]
    return queries[0] if len(queries) == 1 else queries


def _last_numbers(answer: Any, count: int, name: str) -> list[float]:
    """Return the last number in ``data[i].NAME`` of each text. Entries may have an index and any order."""
    data = _list(_value(answer, "data"), count, "data")
    numbers: dict[int, float] = {}
    for position, entry in enumerate(data):
        values = _value(entry, name)
        if not isinstance(values, list) or not values:
            raise ValueError(f"data[{position}].{name} is {shown(values)}, expected a list of numbers")
        index = entry.get("index", position)
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count or index in numbers:
            raise ValueError(f"data[{position}].index is {shown(index)}, expected each of 0 to {count - 1} once")
        numbers[index] = _number(values[-1])
    return [numbers[index] for index in range(count)]


def _value(answer: Any, key: str) -> Any:
    if not isinstance(answer, dict) or key not in answer:
        has_key = isinstance(answer, dict) and key not in ("data", "probs", "embedding")
        hint = "; set reward_key if the score has another key" if has_key else ""
        raise ValueError(f"the response is {shown(answer)}, expected an object with {key}{hint}")
    return answer[key]


def _numbers(values: Any, count: int) -> list[float]:
    """Return the scores of a program, which may compare: true is 1, false is 0."""
    return [float(value) if isinstance(value, bool) else _number(value) for value in _list(values, count, "scores")]


def _list(values: Any, count: int, name: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"{name}: {shown(values)}, expected a list of {count}")
    return values


def _number(value: Any) -> float:
    if not is_score(value):
        raise ValueError(f"the score is {shown(value)}, expected a finite number")
    return float(value)
