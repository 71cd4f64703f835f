"""Requests that a scorer refuses because of a quota: they wait, and are neither failures nor attempts."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from quartet.config.rewards import RetryConfig
from quartet.contract.trajectory import Outcome
from quartet.errors import QuotaExceeded
from quartet.rewards.attempts import Attempts, RequestFailed

STRICT = RetryConfig(max_attempts=1, circuit_breaker_failures=1, max_concurrency=1, timeout_seconds=5.0)


class Pauses:
    """The pauses that the requests made, in seconds. None of them takes time."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    async def sleep(self, seconds: float) -> None:
        """Record a pause."""
        self.seconds.append(seconds)
        await asyncio.sleep(0)


def test_a_refused_request_is_repeated_with_jitter_and_counts_as_no_failure() -> None:
    pauses, sent = Pauses(), list[int]()
    attempts = Attempts(STRICT, "scorer", pauses.sleep)

    async def send(attempt: int) -> str:
        sent.append(attempt)
        if len(sent) <= 20:
            raise QuotaExceeded("run a", 2.0)
        return "scores"

    assert asyncio.run(attempts.run(send, 0)) == "scores"
    assert sent == [0] * 21
    assert len(pauses.seconds) == 20
    assert all(2.0 <= seconds <= 3.0 for seconds in pauses.seconds)
    assert len(set(pauses.seconds)) > 1


def test_a_refusal_shows_that_the_scorer_is_reachable() -> None:
    pauses = Pauses()
    attempts = Attempts(STRICT.model_copy(update={"circuit_breaker_failures": 2}), "scorer", pauses.sleep)

    async def run(*errors: Exception) -> None:
        pending = list(errors)

        async def send(attempt: int) -> str:
            if pending:
                raise pending.pop(0)
            return "scores"

        with pytest.raises(RequestFailed) if isinstance(errors[-1], RequestFailed) else nullcontext():
            await attempts.run(send, 0)

    async def everything() -> None:
        unreachable = RequestFailed(Outcome.SCORER_ERROR, "gone", unreachable=True)
        await run(unreachable)
        await run(QuotaExceeded("run a", 0.5), unreachable)
        await run(QuotaExceeded("run a", 0.5))

    asyncio.run(everything())
    # The circuit breaker would have waited for ten seconds.
    assert STRICT.circuit_breaker_seconds not in pauses.seconds
