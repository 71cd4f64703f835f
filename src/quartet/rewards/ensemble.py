"""Weighted sum of reward sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quartet.errors import ComputationFailed
from quartet.rewards.reward_source import RewardSource, never
from quartet.types import FloatArray, Role, Scores, ServiceStatus, TokenBatch


@dataclass(frozen=True, slots=True)
class EnsemblePart:
    """One source under its name, with its weight in the sum."""

    name: str
    weight: float
    source: RewardSource

    @property
    def is_model(self) -> bool:
        """Return whether the source is a model, which computes in this process. Functions run in separate processes."""
        return self.source.status().parameters > 0


class EnsembleReward:
    """score = sum of weight x score over the parts, summed in float64 in their order. Closes its parts."""

    def __init__(self, parts: Sequence[EnsemblePart]) -> None:
        self._parts = tuple(parts)
        functions = sum(not part.is_model for part in self._parts)
        self._waiting = ThreadPoolExecutor(max_workers=max(1, functions), thread_name_prefix="reward-part")

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), cancelled: Callable[[], bool] = never) -> Scores:
        """Return the weighted sums and, as ``parts``, each source's unweighted scores. Functions and models run concurrently."""
        functions = {
            part.name: self._waiting.submit(part.source.score, batch, fields, cancelled)
            for part in self._parts
            if not part.is_model
        }
        results: dict[str, FloatArray] = {}
        try:
            for part in self._parts:
                if part.is_model:
                    results[part.name] = part.source.score(batch, fields, cancelled).total
        finally:
            # Also if a model fails: wait for every call.
            failures = [future.exception() for future in functions.values()]
        for failure in failures:
            if failure is not None:
                raise failure
        results |= {name: future.result().total for name, future in functions.items()}
        parts = {part.name: results[part.name] for part in self._parts}
        return Scores(self._sum(parts), parts)

    def _sum(self, parts: dict[str, FloatArray]) -> FloatArray:
        total = np.zeros(len(next(iter(parts.values()))), np.float64)
        for part in self._parts:
            total += part.weight * parts[part.name].astype(np.float64)
        with np.errstate(over="ignore"):
            narrow = total.astype(np.float32)
        if not np.isfinite(narrow).all():
            index = int(np.flatnonzero(~np.isfinite(narrow))[0])
            raise ComputationFailed(
                f"reward.parts: the weighted sum of sequence index {index} is {total[index]:g}, out of range for float32; "
                "lower the weights"
            )
        return narrow

    def status(self) -> ServiceStatus:
        """Return the combined status with the strictest limits. If there are models, only they limit vocabulary and length."""
        statuses = [part.source.status() for part in self._parts]
        models = [status for status in statuses if status.parameters]
        limits = [status.max_sequence_tokens for status in models if status.max_sequence_tokens]
        return ServiceStatus(
            role=Role.REWARD,
            model=" + ".join(f"{part.weight:g}*{part.name}" for part in self._parts),
            device=(models or statuses)[0].device,
            dtype=", ".join(dict.fromkeys(status.dtype for status in models)),
            parameters=sum(status.parameters for status in models),
            tokenizer_fingerprint=statuses[0].tokenizer_fingerprint,
            vocabulary_size=min(status.vocabulary_size for status in models or statuses),
            max_sequence_tokens=min(limits, default=0),
        )

    def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            part.source.close()
        self._waiting.shutdown(wait=False)
