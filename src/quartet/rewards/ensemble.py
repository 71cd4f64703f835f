"""Weighted sum of reward sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from quartet.errors import ComputationFailed
from quartet.rewards.reward_source import RewardSource, never
from quartet.types import FloatArray, Outcome, Role, Scores, ServiceStatus, TokenBatch


@dataclass(frozen=True, slots=True)
class EnsemblePart:
    """One source under its name, with its weight in the sum. An ``optional`` source that refuses is left out of the sum."""

    name: str
    weight: float
    source: RewardSource
    optional: bool = False

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
        """Return the weighted sums and, as ``parts``, each source's unweighted scores. Functions and models run concurrently.

        The outcome of a sequence is the first failure among the parts, in their order.
        """
        functions = {
            part.name: self._waiting.submit(part.source.score, batch, fields, cancelled)
            for part in self._parts
            if not part.is_model
        }
        results: dict[str, Scores] = {}
        try:
            for part in self._parts:
                if part.is_model:
                    results[part.name] = part.source.score(batch, fields, cancelled)
        finally:
            # Also if a model fails: wait for every call.
            failures = [future.exception() for future in functions.values()]
        for failure in failures:
            if failure is not None:
                raise failure
        results |= {name: future.result() for name, future in functions.items()}
        scores = [results[part.name] for part in self._parts]
        parts = {part.name: results[part.name].total for part in self._parts}
        if not any(each.outcomes for each in scores):
            return Scores(self._sum(list(parts.values())), parts)
        firsts = [self._first_failure(scores, index) for index in range(len(batch))]
        ok = np.array([outcome is Outcome.OK for outcome, _ in firsts])
        total = np.where(ok, self._sum(list(parts.values())), np.float32(np.nan))
        return Scores(total, parts, tuple(outcome for outcome, _ in firsts), tuple(detail for _, detail in firsts))

    def _first_failure(self, scores: Sequence[Scores], index: int) -> tuple[Outcome, str]:
        """Return the outcome of one sequence and its detail. A sum of no part at all is a refusal."""
        outcomes = [each.all_outcomes[index] for each in scores]
        left_out = [part.optional and each is Outcome.REFUSED for part, each in zip(self._parts, outcomes, strict=True)]
        for part, outcome, each, skipped in zip(self._parts, outcomes, scores, left_out, strict=True):
            if outcome is not Outcome.OK and (not skipped or all(left_out)):
                return outcome, each.all_details[index] or f"reward.parts.{part.name}: {outcome}"
        return Outcome.OK, ""

    def _sum(self, parts: Sequence[FloatArray]) -> FloatArray:
        """Return the weighted sum, NaN where a part that is not optional has no score."""
        total = np.zeros(len(parts[0]), np.float64)
        for part, values in zip(self._parts, parts, strict=True):
            known = np.where(np.isnan(values), 0, values) if part.optional else values
            total += part.weight * known.astype(np.float64)
        with np.errstate(over="ignore"):
            narrow = total.astype(np.float32)
        if (too_large := np.isinf(narrow)).any():
            index = int(np.flatnonzero(too_large)[0])
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
