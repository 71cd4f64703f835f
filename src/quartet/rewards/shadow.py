"""Calls of one source of an ensemble, in parallel with the others. The run does not depend on a shadow, a source with weight 0.

A source accepts one call at a time, so each has its own thread, and its calls wait for one another.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import numpy as np
import structlog

from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import Cancelled, ConfigError, QuartetError, ScorerFailed, ServiceFailed
from quartet.rewards.reward_source import RewardSource

log = structlog.get_logger()

REST_FACTOR = 10.0
"""Pause of a shadow that does not respond, as a multiple of the time that the run has waited for it. It slows the run down by at
most a tenth."""
POLL_SECONDS = 0.1
"""Time between checks whether the caller still waits."""


@dataclass(slots=True)
class ShadowCall:
    """A call of a shadow for a batch. ``future`` is None if the shadow is left out; ``abandoned`` ends the call."""

    sequences: int
    future: Future[Scores] | None = None
    abandoned: threading.Event = field(default_factory=threading.Event)


class SourceThread:
    """The thread that calls one source, by its config ``key``."""

    def __init__(self, key: str, source: RewardSource, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is in seconds."""
        self._key, self._source, self._clock = key, source, clock
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-part")
        self._call: Future[Scores] | None = None
        self._rests_until = -float("inf")

    def start(self, batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool]) -> Future[Scores]:
        """Start to score, after the calls before. The future raises as ``RewardSource.score``."""
        self._call = self._executor.submit(self._source.score, batch, fields, cancelled)
        return self._call

    def start_shadow(self, batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool]) -> ShadowCall:
        """Start to score as a shadow. Do nothing if the call before has not ended, or the shadow rests."""
        call = ShadowCall(len(batch))
        if (self._call is None or self._call.done()) and self._clock() >= self._rests_until:
            call.future = self.start(batch, fields, lambda: cancelled() or call.abandoned.is_set())
        return call

    def close(self) -> None:
        """Close the source and end the thread. A call in progress fails."""
        self._source.close()
        self._executor.shutdown(wait=False)

    def finish(self, call: ShadowCall, deadline: float, cancelled: Callable[[], bool]) -> Scores:
        """Wait for a shadow, and return its scores: none if it fails, or has not ended by ``deadline``. Raises Cancelled."""
        started = self._clock()
        if call.future is None:
            return no_scores(call.sequences, Outcome.TIMEOUT, "left out: it did not respond to an earlier batch")
        while not call.future.done() and self._clock() < deadline:
            if cancelled():
                raise Cancelled("scoring was cancelled by its caller")
            wait([call.future], timeout=max(0.0, min(POLL_SECONDS, deadline - self._clock())))
        if call.future.done():
            # The shadow may notice first that the caller no longer waits.
            if isinstance(call.future.exception(), Cancelled) and cancelled():
                raise Cancelled("scoring was cancelled by its caller")
            scores, responds = _result(call.future, call.sequences)
        else:
            call.abandoned.set()
            scores, responds = no_scores(call.sequences, Outcome.TIMEOUT, "reward.shadow_timeout_seconds passed"), False
        waited = self._clock() - started
        if not responds:
            self._rests_until = self._clock() + REST_FACTOR * waited
        report(self._key, scores, 0.0 if responds else REST_FACTOR * waited)
        return scores


def no_scores(sequences: int, outcome: Outcome, detail: str) -> Scores:
    """Return the scores of a source that has none."""
    nothing = np.full(sequences, np.nan, np.float32)
    return Scores(nothing, outcomes=(outcome,) * sequences, details=(detail,) * sequences)


def failed_scores(error: BaseException, sequences: int) -> Scores:
    """Return the scores of a source that failed for the whole batch. Other errors than these may quote a response."""
    quotable = isinstance(error, ScorerFailed | ServiceFailed | ConfigError)
    return no_scores(sequences, Outcome.SCORER_ERROR, str(error) if quotable else type(error).__name__)


def report(key: str, scores: Scores, pause: float = 0.0) -> None:
    """Log that a shadow has no score for some sequences. ``pause``: seconds for which it is left out."""
    pairs = zip(scores.all_outcomes, scores.all_details, strict=True)
    if failed := [(outcome, detail) for outcome, detail in pairs if outcome is not Outcome.OK]:
        outcome, detail = failed[0]
        log.warning(
            "shadow has no score",
            source=key,
            sequences=len(failed),
            outcome=str(outcome),
            cause=detail,
            pause_seconds=round(pause, 3),
        )


def _result(future: Future[Scores], sequences: int) -> tuple[Scores, bool]:
    """Return the scores of a call that has ended, and whether the source responds in time."""
    error = future.exception()
    if error is None:
        scores = future.result()
        return scores, Outcome.TIMEOUT not in scores.all_outcomes
    if not isinstance(error, QuartetError):
        log.error("shadow failed", exc_info=error)
    return failed_scores(error, sequences), False
