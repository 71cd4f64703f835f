"""Reward source whose scores come from another process: requests in parallel, and one outcome per response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from quartet.contract.status import ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import Cancelled, ServiceFailed
from quartet.rewards.attempts import RequestFailed
from quartet.rewards.response_texts import ResponseTexts, ScoredText
from quartet.rewards.reward_source import Result, never, scores_of

POLL_SECONDS = 0.05
"""Time between checks whether the caller still waits."""
CLOSE_SECONDS = 5.0
"""Time that the connections have to close."""
Value = TypeVar("Value")


class Scorer(Protocol):
    """Client of a scorer. Its methods run on one event loop."""

    batch_size: int
    """Maximum number of responses in one request."""

    async def score(self, texts: Sequence[ScoredText]) -> list[Result]:
        """Return a result for each of the texts, at most ``batch_size``. Raises RequestFailed if the request fails."""

    def take_cured_faults(self) -> int:
        """Return the number of faults that further attempts cured, since the last call."""

    async def close(self) -> None:
        """Close the connections."""


class EventLoopThread:
    """An event loop on a separate thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Value], cancelled: Callable[[], bool] = never) -> Value:
        """Return the result of ``work``. Raises Cancelled, once ``cancelled`` returns True or the loop is closed."""
        if self._loop.is_closed():
            work.close()
            raise Cancelled("the reward source is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                if cancelled() or self._loop.is_closed():
                    future.cancel()
                    raise Cancelled("scoring was cancelled by its caller") from None
            except CancelledError:
                raise Cancelled("the reward source is closed") from None

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` and end the loop with all that runs on it. May be called again."""
        if self._loop.is_closed():
            work.close()
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_end_all(work), self._loop).result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class RemoteReward:
    """Scores of a scorer in another process. Implements RewardSource."""

    def __init__(self, scorer: Callable[[], Scorer], name: str, texts: ResponseTexts, status: ServiceStatus) -> None:
        """``scorer`` creates the client on the event loop. ``name`` starts the messages."""
        self._name, self._texts, self._status = name, texts, status
        self._loop = EventLoopThread("reward-scorer")
        try:
            self._scorer = self._loop.run(_created(scorer))
        except BaseException:
            self._loop.close(_nothing())
            raise

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the scores. Raises ServiceFailed if the scorer is unreachable for all of them: no response is at fault.

        Raises ConfigError if the scorer refuses every request, such as one with a wrong key.
        """
        texts = self._texts.of(batch, fields)
        scores = scores_of(self._loop.run(self._score(texts), cancelled))
        cured = self._scorer.take_cured_faults()
        return replace(scores, cured_faults={"": cured}) if cured else scores

    def status(self) -> ServiceStatus:
        """Return the status: the scorer, and the vocabulary of the tokenizer that decodes for it."""
        return self._status

    def close(self) -> None:
        """Close the connections. A call in progress fails."""
        self._loop.close(self._scorer.close())

    async def _score(self, texts: list[ScoredText]) -> list[Result]:
        size = self._scorer.batch_size
        chunks = [texts[start : start + size] for start in range(0, len(texts), size)]
        parts = await together([self._score_chunk(chunk) for chunk in chunks])
        results = [result for part in parts for result in part]
        failures = [result for result in results if isinstance(result, RequestFailed)]
        if len(failures) == len(results) and all(failure.unreachable for failure in failures):
            raise ServiceFailed(failures[-1].detail)
        return [(item.outcome, item.detail) if isinstance(item, RequestFailed) else item for item in results]

    async def _score_chunk(self, chunk: list[ScoredText]) -> list[Result | RequestFailed]:
        """Return a result per text. If a request with several fails, each is sent in its own: one of them may be the cause."""
        try:
            results = await self._scorer.score(chunk)
        except RequestFailed as failure:
            if failure.unreachable or len(chunk) == 1:
                return [failure] * len(chunk)
            parts = await together([self._score_chunk([text]) for text in chunk])
            return [result for part in parts for result in part]
        if len(results) != len(chunk):
            detail = f"{self._name}: {len(results)} scores for {len(chunk)} responses"
            return [(Outcome.SCORER_ERROR, detail)] * len(chunk)
        return list(results)


async def together(work: Sequence[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Return the results of all coroutines, which run concurrently. The first error cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _created(create: Callable[[], Scorer]) -> Scorer:
    return create()


async def _nothing() -> None:
    return None


async def _end_all(work: Coroutine[Any, Any, None]) -> None:
    """End every task of the loop except this one, then run ``work``."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await work
    await asyncio.get_running_loop().shutdown_asyncgens()
