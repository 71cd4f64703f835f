"""Fake services. Their results are functions of the requests, and the test decides when calls end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quartet.contract.arrays import FloatArray
from quartet.contract.status import Role
from quartet.contract.trajectory import Scores, TokenBatch, Trajectory
from quartet.errors import BufferFailed, Cancelled
from quartet.rpc.service_channel import Call
from tests.waiting import LIMIT


class FakeCall(Call[Any]):
    """A call that the test completes, with a result or an error."""

    def __init__(self, compute: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._compute = compute
        self.on_cancel(lambda: None if self.done() else self.set_exception(Cancelled("cancelled")))

    def complete(self, error: Exception | None = None) -> None:
        if error is not None:
            self.set_exception(error)
        elif not self.done():
            self.set_result(self._compute() if self._compute else None)

    def result(self, timeout: float | None = LIMIT) -> Any:
        return super().result(timeout)


class FakeGeneration(FakeCall):
    """A generation that the test completes, and which records the trajectories that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[Trajectory] = []
        self.newer: dict[int, bytes] = {}
        self.abandoned_attempts: set[int] = set()

    def abandoned(self, trajectory: Trajectory) -> bool:
        return trajectory.attempt in self.abandoned_attempts

    def wrong_origin(self, trajectory: Trajectory) -> str:
        return ""

    def arrived(self, trajectory: Trajectory) -> bool:
        self.arrivals.append(trajectory)
        return True

    def newer_weights(self) -> dict[int, bytes]:
        return self.newer

    def refuse(self, trajectory: Trajectory, reason: str) -> None:
        raise BufferFailed(reason)


class Scorer:
    """Reward, reference and critic in one. Calls complete at once unless ``blocked``."""

    role = Role.REFERENCE

    def __init__(self, blocked: bool = False, failure: Exception | None = None, fails_at: str = "") -> None:
        self._blocked, self._failure, self._fails_at = blocked, failure, fails_at
        self.batches: list[TokenBatch] = []
        self.fields: list[list[str]] = []
        self.calls: list[FakeCall] = []
        self.temperatures: set[float] = set()
        self.processes = 1

    def replicas(self) -> int:
        return self.processes

    def start(self, begin: Callable[[Any], Any]) -> Any:
        return begin(self)

    def _call(self, name: str, compute: Callable[[], Any]) -> Any:
        call = FakeCall(compute)
        self.calls.append(call)
        if name == self._fails_at:
            call.complete(self._failure)
        elif not self._blocked:
            call.complete()
        return call

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), weights: Any = None) -> Any:
        self.batches.append(batch)
        self.fields.append(list(fields))
        first = np.array([sequence[0] for sequence in batch.sequences()], np.float32)
        return self._call("score", lambda: Scores(first, {"half": first / 2}))

    def log_probs(self, batch: TokenBatch, temperature: float, version: Any = None) -> Any:
        self.temperatures.add(temperature)
        return self._call("log_probs", lambda: -responses(batch))

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> Any:
        return self._call("values", lambda: 2 * responses(batch))


def responses(batch: TokenBatch) -> FloatArray:
    """Return the response token ids of all sequences as floats, concatenated."""
    parts = [ids[prompt:] for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)]
    return np.concatenate(parts).astype(np.float32)
