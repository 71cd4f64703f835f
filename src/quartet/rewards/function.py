"""Reward source that calls a user's Python function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quartet.config import RewardSourceConfig
from quartet.errors import Cancelled, ConfigError, FunctionFailed, InvalidRequest
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.rewards.function_worker import FunctionWorker
from quartet.rewards.reward_source import never, parse_fields
from quartet.types import FloatArray, IntArray, Role, Scores, ServiceStatus, TokenBatch

_LARGEST = float(np.finfo(np.float32).max)


class FunctionReward:
    """Scores by f(prompt, response, fields) -> number; or, if batched, by f(prompts, responses, fields) -> numbers, all of them
    lists.

    ``prompt`` is the text of the policy's prompt tokens with special tokens, so that the turns of a chat can be distinguished.
    ``response`` has no special tokens. Tokens that the tokenizer does not know have no text. A policy with a padded embedding can
    sample them. ``fields`` is the JSON object of the prompt line, {} if it has none.
    """

    def __init__(self, config: RewardSourceConfig, tokenizer: str, key: str = "reward") -> None:
        """Start the function's process. ``key`` is the config's key of this source. Raises ModelError, ConfigError."""
        if config.function is None:
            raise ConfigError(f"{key}.function: missing; source function needs it")
        self._tokenizer = load_tokenizer(tokenizer)
        self._has_text = _known_ids(self._tokenizer)
        self._name, self._batched, self._timeout = (
            f"{key}.function {config.function}",
            config.batched,
            config.timeout_seconds,
        )
        self._status = ServiceStatus(
            role=Role.REWARD,
            model=config.function,
            device="cpu",
            tokenizer_fingerprint=tokenizer_fingerprint(self._tokenizer),
            vocabulary_size=len(self._tokenizer),
        )
        self._worker = FunctionWorker(config.function, f"{key}.function", quotes=config.quote_texts)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the function's score of each prompt+response. The timeout applies to each call, of a sequence or a batch."""
        objects = parse_fields(fields, len(batch))
        prompts, responses = self._texts(batch)
        if self._batched:
            return Scores(self._score_together(prompts, responses, objects))
        result = np.empty(len(batch), np.float32)
        for index, arguments in enumerate(zip(prompts, responses, objects, strict=True)):
            if cancelled():
                raise Cancelled(f"{self._name}: cancelled by its caller")
            about = f"sequence index {index}"
            value = self._worker.call(arguments, self._timeout, about)
            result[index] = _number(value, f"{self._name}, {about}: returned")
        return Scores(result)

    def status(self) -> ServiceStatus:
        """Return the status: the function and the vocabulary of its tokenizer."""
        return self._status

    def close(self) -> None:
        """End the function's process."""
        self._worker.close()

    def _score_together(self, prompts: list[str], responses: list[str], objects: list[dict[str, Any]]) -> FloatArray:
        where = f"{self._name}, a batch of {len(prompts)}"
        values = self._worker.call([prompts, responses, objects], self._timeout, f"a batch of {len(prompts)}")
        if not isinstance(values, list) or len(values) != len(prompts):
            raise FunctionFailed(f"{where}: returned {_shown(values)}, expected a list of {len(prompts)} numbers")
        numbers = [_number(value, f"{where}: at index {index} returned") for index, value in enumerate(values)]
        return np.array(numbers, np.float32)

    def _texts(self, batch: TokenBatch) -> tuple[list[str], list[str]]:
        lowest = int(batch.token_ids.min())
        if lowest < 0:
            raise InvalidRequest(f"token_ids: found {lowest}, expected 0 or more")
        prompts, responses = [], []
        for sequence, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True):
            prompts.append(self._text(sequence[:prompt], special=True))
            responses.append(self._text(sequence[prompt:], special=False))
        return prompts, responses

    def _text(self, token_ids: IntArray, special: bool) -> str:
        inside = token_ids[token_ids < len(self._has_text)]
        known = inside[self._has_text[inside]].tolist()
        # No clean-up of spaces: a function that compares texts needs the exact text.
        text = self._tokenizer.decode(known, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)


def _known_ids(tokenizer: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    ids = np.fromiter(tokenizer.get_vocab().values(), np.int64)
    known = np.zeros(int(ids.max()) + 1, np.bool_)
    known[ids] = True
    return known


def _number(value: Any, where: str) -> float:
    """Return a score as a float. Raises FunctionFailed if it is not a finite number in the range of float32."""
    # A bool is an int in Python, but as a reward it is more likely a mistake.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise FunctionFailed(f"{where} {_shown(value)}, expected a finite number")
    return float(value)


def _shown(value: Any) -> str:
    """Describe a returned value without quoting text, which may come from a prompt or response."""
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "an integer beyond float32"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}, beyond float32" if abs(value) > _LARGEST else f"{value:g}"
    return repr(value)
