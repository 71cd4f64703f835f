"""Attempts of requests to a scorer in another process: concurrency, time limits, retries and a circuit breaker.

None of these decides a score: they only decide when a request is sent, and after how many attempts it has failed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from quartet.config.rewards import RetryConfig
from quartet.contract.trajectory import Outcome
from quartet.errors import ConfigError, QuotaExceeded
from quartet.rpc.replica_set import QUOTA_JITTER

log = structlog.get_logger()

Answer = TypeVar("Answer")
Sleep = Callable[[float], Awaitable[None]]
"""Function that waits for a number of seconds."""


class RequestFailed(Exception):
    """A request without a score. ``detail`` quotes neither prompts nor responses.

    ``retry``: another attempt may succeed. ``unreachable``: the scorer does not respond at all, whatever it is asked.
    ``at_start``: error of the config that this is, unless the scorer has answered before.
    """

    def __init__(
        self,
        outcome: Outcome,
        detail: str,
        retry: bool = False,
        unreachable: bool = False,
        at_start: ConfigError | None = None,
    ) -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.retry, self.unreachable = outcome, detail, retry, unreachable
        self.at_start = at_start


def no_longer_a_scorer(error: ConfigError) -> RequestFailed:
    """Return the failure of a request whose answer is not that of a scorer: the address may be wrong, or a proxy answers."""
    return RequestFailed(Outcome.SCORER_ERROR, str(error), retry=True, unreachable=True, at_start=error)


class CircuitBreaker:
    """Protection of a scorer that does not respond: after several failures in a row, one request tries for all.

    Only unreachable scorers count, because any other failure may be that of a single response.
    """

    def __init__(self, config: RetryConfig, name: str, sleep: Sleep) -> None:
        """``name`` is that of the scorer. ``sleep`` makes all pauses."""
        self._limit, self._seconds = config.circuit_breaker_failures, config.circuit_breaker_seconds
        self._name, self._sleep = name, sleep
        self._failures = 0
        self._responds = True
        self._trial: asyncio.Future[RequestFailed | None] | None = None

    async def admit(self) -> asyncio.Future[RequestFailed | None] | None:
        """Wait until a request may be sent. Return the trial if the caller makes it; ``record`` ends it.

        Raises RequestFailed if the trial of another request fails.
        """
        if self._failures < self._limit:
            return None
        if self._trial is None:
            trial = self._trial = asyncio.get_running_loop().create_future()
            try:
                await self._sleep(self._seconds)
            except asyncio.CancelledError:
                self._end(trial, None)
                raise
            return trial
        if (failure := await asyncio.shield(self._trial)) is not None:
            raise failure
        return None

    def record(self, trial: asyncio.Future[RequestFailed | None] | None, failure: RequestFailed | None) -> None:
        """Take note of the end of an attempt. Log the first one without a response, and the first response after it."""
        responds = failure is None or (not failure.unreachable and failure.outcome is not Outcome.TIMEOUT)
        if failure is not None and self._responds and not responds:
            log.warning("scorer does not respond", scorer=self._name, error=failure.detail)
        elif responds and not self._responds:
            log.info("scorer responds again", scorer=self._name)
        self._responds = responds
        if responds:
            self._failures = 0
        elif failure is not None and failure.unreachable:
            self._failures += 1
        if trial is not None:
            self._end(trial, failure if self._failures >= self._limit else None)

    def abandon(self, trial: asyncio.Future[RequestFailed | None] | None) -> None:
        """End an attempt that shows nothing. Another request makes the trial."""
        if trial is not None:
            self._end(trial, None)

    def _end(self, trial: asyncio.Future[RequestFailed | None], failure: RequestFailed | None) -> None:
        self._trial = None
        if not trial.done():
            trial.set_result(failure)


class Attempts:
    """Attempts of all requests to one scorer. To be used on one event loop."""

    def __init__(self, config: RetryConfig, name: str, sleep: Sleep = asyncio.sleep) -> None:
        """``name`` starts the messages. ``sleep`` makes all pauses."""
        self._config, self._name, self._sleep = config, name, sleep
        self._turns = asyncio.Semaphore(config.max_concurrency)
        self._breaker = CircuitBreaker(config, name, sleep)
        self._has_answered = False
        self._cured_faults = 0

    def take_cured_faults(self) -> int:
        """Return the number of failed attempts whose request succeeded later, since the last call."""
        cured, self._cured_faults = self._cured_faults, 0
        return cured

    async def run(self, send: Callable[[int], Awaitable[Answer]], updates: int) -> Answer:
        """Return the result of ``send``, which gets the number of the attempt, from 0. Raises RequestFailed after the last.

        Raises the config error of that failure instead, if the scorer has never answered. ``updates`` of the policy before the
        responses: there is none without scores, so the scorer has answered then, maybe to an earlier process.
        """
        config = self._config
        self._has_answered |= updates > 0
        for attempt in range(config.max_attempts):
            try:
                answer = await self._attempt(send, attempt)
            except RequestFailed as failure:
                if not failure.retry or attempt == config.max_attempts - 1:
                    if failure.at_start is not None and not self._has_answered:
                        raise failure.at_start from None
                    raise
            else:
                self._cured_faults += attempt
                return answer
            # Jitter keeps requests that failed together apart. It changes the time of an attempt and no result.
            await self._sleep(config.pause(attempt + 1) * random.uniform(0.5, 1.5))
        raise AssertionError("max_attempts is at least 1")

    async def _attempt(self, send: Callable[[int], Awaitable[Answer]], attempt: int) -> Answer:
        """Send the request until no quota refuses it. A refused request keeps its place among those in flight while it waits."""
        async with self._turns:
            while True:
                try:
                    return await self._send(send, attempt)
                except QuotaExceeded as refused:
                    await self._sleep(refused.retry_seconds * random.uniform(*QUOTA_JITTER))

    async def _send(self, send: Callable[[int], Awaitable[Answer]], attempt: int) -> Answer:
        trial = await self._breaker.admit()
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                answer = await send(attempt)
        except TimeoutError:
            text = f"{self._name}: no response within {self._config.timeout_seconds:g} s"
            failure = RequestFailed(Outcome.TIMEOUT, text, retry=True)
            self._breaker.record(trial, failure)
            raise failure from None
        except RequestFailed as failure:
            # Only a scorer that knows the request can refuse its content.
            self._has_answered |= failure.outcome is Outcome.REFUSED
            if failure.at_start is not None and not self._has_answered:
                # A wrong address is reported after a few attempts, and not after the pauses of the circuit breaker.
                self._breaker.abandon(trial)
            else:
                self._breaker.record(trial, failure)
            raise
        except QuotaExceeded:
            # The scorer responds.
            self._breaker.record(trial, None)
            raise
        except BaseException:
            # Cancelled, or a config error: neither says whether the scorer is reachable.
            self._breaker.abandon(trial)
            raise
        self._breaker.record(trial, None)
        self._has_answered = True
        return answer
