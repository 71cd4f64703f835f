"""Fake services: results follow from the requests, and the test decides when calls end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quartet.errors import Cancelled
from quartet.types import FloatArray, Role, Scores, TokenBatch


class FakeCall:
    """A call under way, answered or failed by the test."""

    def __init__(self, compute: Callable[[], Any] | None = None) -> None:
        self._compute = compute
        self._done = threading.Event()
        self._error: Exception | None = None
        self.cancelled = False
        self._heard: list[Callable[[], None]] = []

    def answer(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.set()
        for heard in self._heard:
            heard()

    def when_done(self, heard: Callable[[], None]) -> None:
        if self._done.is_set():
            heard()
        else:
            self._heard.append(heard)

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        assert self._done.wait(20)
        if self.cancelled:
            raise Cancelled("cancelled")
        if self._error is not None:
            raise self._error
        return self._compute() if self._compute else None

    def cancel(self) -> None:
        self.cancelled = True
        self._done.set()


class Scorer:
    """Reward, reference and critic in one. Answers at once unless ``held``."""

    role = Role.REFERENCE

    def __init__(self, held: bool = False, failure: Exception | None = None, fails_at: str = "") -> None:
        self._held, self._failure, self._fails_at = held, failure, fails_at
        self.batches: list[TokenBatch] = []
        self.fields: list[list[str]] = []
        self.calls: list[FakeCall] = []
        self.temperatures: set[float] = set()
        self.processes = 1

    def replicas(self) -> int:
        return self.processes

    def _call(self, name: str, compute: Callable[[], Any]) -> Any:
        actual = FakeCall(compute)
        self.calls.append(actual)
        if name == self._fails_at:
            actual.answer(self._failure)
        elif not self._held:
            actual.answer()
        return actual

    def score(self, batch: TokenBatch, fields: Sequence[str] = ()) -> Any:
        self.batches.append(batch)
        self.fields.append(list(fields))
        first = np.array([sequence[0] for sequence in batch.sequences()], np.float32)
        return self._call("score", lambda: Scores(first, {"half": first / 2}))

    def log_probs(self, batch: TokenBatch, temperature: float) -> Any:
        self.temperatures.add(temperature)
        return self._call("log_probs", lambda: -responses(batch))

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> Any:
        return self._call("values", lambda: 2 * responses(batch))


def responses(batch: TokenBatch) -> FloatArray:
    """The response token ids as numbers, flat."""
    parts = [ids[prompt:] for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)]
    return np.concatenate(parts).astype(np.float32)
