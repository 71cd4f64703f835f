"""Reward source that calls a user's Python function."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from quartet.config.rewards import TRL_NO_COLUMNS, RewardSourceConfig
from quartet.contract.logged_values import cleaned
from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import Cancelled, ConfigError, FunctionFailed
from quartet.rewards.response_texts import ResponseTexts, ScoredText
from quartet.rewards.reward_source import Result, Score, completed, is_score, never, scores_of, shown
from quartet.rewards.signatures import SIGNATURES, Signature
from quartet.system.user_function import FunctionWorker

_REMEDIES = {
    "trl": "return one number per completion, or None for one that it does not score",
    "verl": 'return a number, or {"score": a number}',
    "openrlhf": 'return {"rewards": a tensor or a list with one number}',
}
"""Advice on values to return instead of another one, by signature."""


class FunctionReward:
    """Scores by f(prompt, response, fields) -> number; or, if batched, by f(prompts, responses, fields) -> numbers, all of them
    lists; or by the signatures of TRL and verl.

    ``fields`` is the JSON object of the prompt line, {} if it has none. See ScoredText for the texts.
    """

    def __init__(
        self,
        config: RewardSourceConfig,
        tokenizer: str,
        key: str = "reward",
        max_steps: int | None = None,
        has_environment: bool = False,
    ) -> None:
        """Start the function's process. ``key`` is the config's key of this source. Raises ModelError, ConfigError.

        ``max_steps``: steps of the run, for functions that ask for them; None if the function scores for several runs.
        ``has_environment``: a response may have several turns.
        """
        if config.function is None:
            raise ConfigError(f"{key}.function: missing; source function needs it")
        self._texts = ResponseTexts(tokenizer)
        self._name, self._timeout = f"{key}.function {config.function}", config.timeout_seconds
        self._signature: Signature = SIGNATURES["batched" if config.batched else config.signature]
        self._arguments, self._max_steps, self._has_environment = config.arguments, max_steps, has_environment
        name = "batched" if config.batched else config.signature
        # slime names the key of a dictionary in its settings.
        self._score_key = config.arguments.get("reward_key") if name == "slime" else self._signature.score_key
        self._wanted = (
            "a finite number" if self._score_key is None else f"a finite number or an object with {self._score_key}"
        )
        self._remedy = _REMEDIES.get(name, "return a number, for example 0.0")
        self._status = self._texts.status(config.function)
        self._worker = FunctionWorker(config.function, f"{key}.function", quotes=config.quote_texts)

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the function's score of each prompt+response. The timeout applies to each call, of a sequence or a batch.

        Raises FunctionFailed if a function of lists fails for several sequences, because the cause may be any of them.
        """
        return completed(self.score_in_units(batch, fields, cancelled))

    def score_in_units(
        self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never
    ) -> Generator[None, None, Scores]:
        """Compute the scores of ``score``. Yields between two calls of the function."""
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
        signature, where = self._signature, f"{self._name}, {about}"
        expected = f"a list of {len(texts)} finite numbers" if signature.takes_lists else self._wanted
        try:
            request = self._request(texts)
        except ValueError as error:
            raise FunctionFailed(f"{where}: {error}") from None
        value, logged = self._worker.exchange(request, self._timeout, about, f"{expected}; {self._remedy}")
        metrics, columns = logged.get("metrics", {}), logged.get("columns", {})
        if not signature.takes_lists:
            return [self._result(value, f"{where}: returned", metrics)]
        if not isinstance(value, list):
            raise FunctionFailed(f"{where}: returned {shown(value)}, expected {expected}; {self._remedy}")
        if len(value) != len(texts):
            # One by one, a function that returns one value for all would pass, and its scores would mean something else.
            raise ConfigError(
                f"{where}: returned a list of {len(value)}, expected {expected}; return exactly one number for each response"
            )
        return [
            self._result(
                each,
                f"{where}: at index {index} returned",
                {**metrics, **{name: column[index] for name, column in columns.items()}},
            )
            for index, each in enumerate(value)
        ]

    def _request(self, texts: Sequence[ScoredText]) -> dict[str, Any]:
        """Return the call of the function. Raises ValueError if a prompt line lacks a field."""
        signature = self._signature
        arguments, keywords = signature.arguments(texts)
        if signature.takes_columns:
            # A column that other lines have: null, whatever lines are in this batch. The preflight has found it in some line.
            missing = [name for name in self._worker.required if name not in TRL_NO_COLUMNS]
            keywords = {**{name: [None] * len(texts) for name in missing}, **keywords}
        if "trainer_state" in keywords and self._max_steps is not None:
            keywords["trainer_state"]["max_steps"] = self._max_steps
        if "extra_info" in keywords and self._has_environment:
            keywords["extra_info"]["num_turns"] = None
        if signature.settings is None:
            keywords |= self._arguments
        else:
            arguments[signature.settings] = self._arguments
        return {
            "arguments": arguments,
            "keywords": keywords,
            "objects": [name for name in signature.objects if name not in self._arguments],
            "logs": len(texts) if signature.logs else 0,
            "score_key": self._score_key,
            "single_lists": signature.has_single_lists,
            "lists": signature.takes_lists,
        }

    def _result(self, value: Any, where: str, logged: Mapping[str, Any]) -> Result:
        """Return a score, or the outcome of a function that declines. Raises FunctionFailed for any other value."""
        key = self._score_key
        if key is not None and isinstance(value, dict):
            if key not in value:
                raise FunctionFailed(f"{where} {shown(value)} without {key!r}, expected {self._wanted}; {self._remedy}")
            value, where = value[key], f"{where} {key}"
        elif self._signature.has_single_lists:
            raise FunctionFailed(f"{where} {shown(value)}, expected {self._wanted}; {self._remedy}")
        if self._signature.may_decline and (value is None or value != value):
            return Outcome.REFUSED, f"{where} {'None' if value is None else 'NaN'}: it does not score this response"
        if isinstance(value, bool) and self._signature.counts_booleans:
            value = float(value)
        if not is_score(value):
            raise FunctionFailed(f"{where} {shown(value)}, expected {self._wanted}; {self._remedy}")
        return Score(np.float32(value), cleaned(logged)) if logged else float(np.float32(value))
