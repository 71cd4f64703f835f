"""A RewardService of the contract as a source: it runs elsewhere, in any language."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quartet.config.deployment import TimeoutsConfig
from quartet.config.rewards import ServiceRewardConfig
from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import (
    Cancelled,
    ComputationFailed,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    MismatchError,
    NoResponse,
    QuartetError,
    QuotaExceeded,
    ServiceBusy,
    ServiceUnavailable,
)
from quartet.rewards.attempts import Attempts, RequestFailed
from quartet.rewards.response_texts import ScoredText
from quartet.rewards.reward_source import Result, Score
from quartet.rpc.clients import RewardClient
from quartet.rpc.security.credentials import Credentials


class ServiceScorer:
    """Scorer behind a RewardService. Implements Scorer."""

    def __init__(self, config: ServiceRewardConfig, key: str, credentials: Credentials) -> None:
        """``key`` is the config key of the section."""
        timeouts = TimeoutsConfig(load_seconds=config.start_timeout_seconds, score_seconds=config.timeout_seconds)
        self._client = RewardClient(config.address, timeouts, credentials)
        self._client.channel.address_key = f"{key}.address"
        self._where = f"{key}: {config.address}"
        self._attempts = Attempts(config, self._where)
        self.batch_size = config.batch_size
        self._unchecked: ServiceStatus | None = None
        self._cured_there = 0

    def wait_until_ready(self) -> ServiceStatus:
        """Wait until the service responds, and return its status as that of this source. Raises MismatchError."""
        return _as_source(self._client.wait_until_ready())

    def status_now(self) -> ServiceStatus:
        """Return the status of the service as that of this source. Raises the error of the call."""
        return _as_source(self._client.status())

    def check_later(self, expected: ServiceStatus) -> None:
        """Compare the vocabulary of the service with that of ``expected`` before the first call. It raises MismatchError."""
        self._unchecked = expected

    async def score(self, texts: Sequence[ScoredText]) -> list[Result]:
        batch = TokenBatch(
            np.concatenate([text.token_ids for text in texts]),
            np.array([text.prompt_tokens for text in texts], np.int32),
            np.array([len(text.token_ids) - text.prompt_tokens for text in texts], np.int32),
            max(text.updates for text in texts),
        )
        fields = [json.dumps(text.fields) for text in texts]

        async def send(_: int) -> Scores:
            try:
                await self._check()
                return await asyncio.wrap_future(self._client.score(batch, fields))
            except (ConfigError, QuotaExceeded):
                raise
            except QuartetError as error:
                raise self._failure(error) from None

        scores = await self._attempts.run(send, batch.updates)
        self._cured_there += sum(scores.cured_faults.values())
        return [
            Score(score, logged) if outcome is Outcome.OK else (outcome, f"{self._where}: {detail or outcome}")
            for score, outcome, detail, logged in zip(
                scores.total, scores.all_outcomes, scores.all_details, scores.all_logged, strict=True
            )
        ]

    def take_cured_faults(self) -> int:
        """Return the number of cured faults since the last call, with those that the service reports."""
        cured, self._cured_there = self._cured_there, 0
        return cured + self._attempts.take_cured_faults()

    async def close(self) -> None:
        """Close the connection."""
        self._client.close()

    async def _check(self) -> None:
        if self._unchecked is None:
            return
        _, status = await asyncio.wrap_future(self._client.start_status())
        if status.tokenizer_fingerprint != self._unchecked.tokenizer_fingerprint:
            raise MismatchError(
                f"{self._where}: its vocabulary is not that of reward.tokenizer, so token ids would be misread; use a service "
                "with the tokenizer of the policy"
            )
        self._unchecked = None

    def _failure(self, error: QuartetError) -> RequestFailed:
        """Convert an error of the call. Its text is left out: the service may quote a response."""
        kind = type(error).__name__
        if isinstance(error, ServiceUnavailable | ServiceBusy):
            text = f"{self._where}: does not respond ({kind}); start the service, or correct the address"
            return RequestFailed(Outcome.SCORER_ERROR, text, retry=True, unreachable=True)
        if isinstance(error, NoResponse | DeadlinePassed):
            return RequestFailed(Outcome.TIMEOUT, f"{self._where}: no response in time", retry=True)
        if isinstance(error, Cancelled):
            return RequestFailed(Outcome.CANCELLED, f"{self._where}: the service cancelled the call", retry=True)
        retry = not isinstance(error, InvalidRequest | ComputationFailed)
        return RequestFailed(Outcome.SCORER_ERROR, f"{self._where}: failed ({kind})", retry=retry)


def _as_source(status: ServiceStatus) -> ServiceStatus:
    """Return the status of a source whose model computes elsewhere."""
    return replace(status, parameters=0, device="cpu", dtype="")
