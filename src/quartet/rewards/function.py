"""Reward source that calls a user's Python function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quartet.config import RewardSourceConfig
from quartet.errors import Cancelled, ConfigError, FunctionFailed
from quartet.rewards.function_worker import FunctionWorker
from quartet.rewards.numbers import is_score, shown
from quartet.rewards.response_texts import ResponseTexts, ScoredText
from quartet.rewards.reward_source import Result, Units, completed, never, scores_of
from quartet.rewards.signatures import SIGNATURES, Signature
from quartet.types import Outcome, Scores, ServiceStatus, TokenBatch


class FunctionReward:
    """Scores by f(prompt, response, fields) -> number; or, if batched, by f(prompts, responses, fields) -> numbers, all of them
    lists; or by the signatures of TRL and verl.

    ``fields`` is the JSON object of the prompt line, {} if it has none. See ScoredText for the texts.
    """

    def __init__(self, config: RewardSourceConfig, tokenizer: str, key: str = "reward") -> None:
        """Start the function's process. ``key`` is the config's key of this source. Raises ModelError, ConfigError."""
        if config.function is None:
            raise ConfigError(f"{key}.function: missing; source function needs it")
        self._texts = ResponseTexts(tokenizer)
        self._name, self._timeout = f"{key}.function {config.function}", config.timeout_seconds
        self._signature: Signature = SIGNATURES["batched" if config.batched else config.signature]
        self._arguments = config.arguments
        self._status = self._texts.status(config.function)
        self._worker = FunctionWorker(config.function, f"{key}.function", quotes=config.quote_texts)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the function's score of each prompt+response. The timeout applies to each call, of a sequence or a batch.

        Raises FunctionFailed if a function of lists fails for several sequences, because the cause may be any of them.
        """
        return completed(self.score_in_units(batch, fields, cancelled))

    def score_in_units(
        self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never
    ) -> Units[Scores]:
        """See ``DivisibleSource.score_in_units``. A unit is a call of the function."""
        texts = self._texts.of(batch, fields)
        if self._signature.takes_lists and len(texts) > 1:
            return scores_of(self._call(texts, f"a batch of {len(texts)}"))
        results = list[Result]()
        for index, text in enumerate(texts):
            if index:
                yield
            if cancelled():
                raise Cancelled(f"{self._name}: cancelled by its caller")
            try:
                results += self._call([text], f"sequence index {index}")
            except FunctionFailed as error:
                results.append((Outcome(error.outcome), str(error)))
        return scores_of(results)

    def status(self) -> ServiceStatus:
        """Return the status: the function and the vocabulary of its tokenizer."""
        return self._status

    def close(self) -> None:
        """End the function's process."""
        self._worker.close()

    def _call(self, texts: Sequence[ScoredText], about: str) -> list[Result]:
        signature = self._signature
        try:
            arguments, keywords = signature.arguments(texts)
        except ValueError as error:
            raise FunctionFailed(f"{self._name}, {about}: {error}") from None
        value = self._worker.call(arguments, self._timeout, about, {**keywords, **self._arguments})
        where = f"{self._name}, {about}"
        if not signature.takes_lists:
            return [self._result(value, f"{where}: returned")]
        if not isinstance(value, list) or len(value) != len(texts):
            raise FunctionFailed(f"{where}: returned {shown(value)}, expected a list of {len(texts)} numbers")
        return [self._result(each, f"{where}: at index {index} returned") for index, each in enumerate(value)]

    def _result(self, value: Any, where: str) -> Result:
        """Return a score, or the outcome of a function that declines. Raises FunctionFailed for any other value."""
        if self._signature.score_key is not None and isinstance(value, dict):
            value = value.get(self._signature.score_key)
        if value is None and self._signature.may_decline:
            return Outcome.REFUSED, f"{where} None: it does not score this response"
        if not is_score(value):
            raise FunctionFailed(f"{where} {shown(value)}, expected a finite number")
        return float(np.float32(value))
