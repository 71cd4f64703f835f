"""Weighted sum of reward sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quartet.contract.arrays import FloatArray
from quartet.contract.logged_values import merged
from quartet.contract.status import Role, ServiceStatus
from quartet.contract.trajectory import Outcome, Scores, TokenBatch
from quartet.errors import ComputationFailed, MismatchError, QuartetError
from quartet.rewards.reward_source import RewardSource, never, score_in_units
from quartet.rewards.shadow import SourceThread, failed_scores, report


@dataclass(frozen=True, slots=True)
class EnsemblePart:
    """One source under its name, with its weight in the sum. An ``optional`` function that refuses counts as 0."""

    name: str
    weight: float
    source: RewardSource
    optional: bool = False

    @property
    def key(self) -> str:
        """Config key of the source."""
        return f"reward.parts.{self.name}"

    @property
    def is_model(self) -> bool:
        """Return whether the source is a model, which computes in this process. Functions run in separate processes."""
        return self.source.status().parameters > 0


class EnsembleReward:
    """score = sum of weight x score over the parts, summed in float64 in their order. Closes its parts.

    A part with weight 0 is a shadow: it is scored, and nothing depends on its scores or its failures.
    """

    def __init__(self, parts: Sequence[EnsemblePart], shadow_timeout_seconds: float = 60.0) -> None:
        """``shadow_timeout_seconds``: time for which a batch waits for shadows, once the other parts have scored it."""
        self._parts, self._shadow_timeout = tuple(parts), shadow_timeout_seconds
        self._threads = {part.name: SourceThread(part.key, part.source) for part in self._parts if not part.is_model}

    def score(
        self,
        batch: TokenBatch,
        fields: Sequence[str] = (),
        cancelled: Callable[[], bool] = never,
        weights: Mapping[str, float] | None = None,
    ) -> Scores:
        """Return the weighted sums and, as ``parts``, each source's unweighted scores. Functions and models run concurrently.

        ``weights`` of all parts by name replace those of the config. The outcome of a sequence is the first failure among the
        parts whose weight is not 0, in their order. Raises MismatchError if ``weights`` are not those of the parts.
        """
        used = self._used_weights(weights)
        weighted = [part for part in self._parts if used[part.name]]
        shadows = [part for part in self._parts if not used[part.name]]
        calls = {
            part.name: self._threads[part.name].start_shadow(batch, fields, cancelled)
            for part in shadows
            if part.name in self._threads
        }
        try:
            results = self._score_weighted(weighted, batch, fields, cancelled)
            deadline = time.monotonic() + self._shadow_timeout
            results |= {
                part.name: _model_shadow(part, batch, fields) for part in shadows if part.name not in self._threads
            }
            results |= {name: self._threads[name].finish(call, deadline, cancelled) for name, call in calls.items()}
        finally:
            # If a part with a weight has failed, no one needs the scores of the shadows.
            for call in calls.values():
                call.abandoned.set()
        return self._combine(weighted, used, results, len(batch))

    def score_in_units(
        self,
        batch: TokenBatch,
        fields: Sequence[str] = (),
        cancelled: Callable[[], bool] = never,
        weights: Mapping[str, float] | None = None,
    ) -> Generator[None, None, Scores]:
        """Compute the scores of ``score``, part after part. Yields between two units of a part.

        A part that is not a model is one unit: it computes on its thread, which may still have a call of another run.
        """
        used = self._used_weights(weights)
        weighted = [part for part in self._parts if used[part.name]]
        results: dict[str, Scores] = {}
        for index, part in enumerate(weighted):
            if index:
                yield
            if part.name in self._threads:
                results[part.name] = self._threads[part.name].start(batch, fields, cancelled).result()
            else:
                results[part.name] = yield from score_in_units(part.source, batch, fields, cancelled)
        deadline = time.monotonic() + self._shadow_timeout
        for part in self._parts:
            if used[part.name]:
                continue
            yield
            thread = self._threads.get(part.name)
            results[part.name] = (
                _model_shadow(part, batch, fields)
                if thread is None
                else thread.finish(thread.start_shadow(batch, fields, cancelled), deadline, cancelled)
            )
        return self._combine(weighted, used, results, len(batch))

    def _combine(
        self, weighted: Sequence[EnsemblePart], weights: Mapping[str, float], results: Mapping[str, Scores], count: int
    ) -> Scores:
        """Return the weighted sums of ``count`` sequences, with the scores of all parts."""
        scores = [results[part.name] for part in weighted]
        parts = {part.name: results[part.name].total for part in self._parts}
        cured = {name: sum(each.cured_faults.values()) for name, each in results.items() if each.cured_faults}
        total = self._sum(weighted, weights, scores)
        sources = [results[part.name].logged for part in self._parts if results[part.name].logged]
        logged = tuple(merged(values) for values in zip(*sources, strict=True))
        if not any(each.outcomes for each in scores):
            return Scores(total, parts, logged=logged, cured_faults=cured)
        firsts = [_first_failure(weighted, scores, index) for index in range(count)]
        ok = np.array([outcome is Outcome.OK for outcome, _ in firsts])
        total = np.where(ok, total, np.float32(np.nan))
        outcomes, details = zip(*firsts, strict=True)
        return Scores(total, parts, outcomes, details, logged, cured)

    def _score_weighted(
        self, parts: Sequence[EnsemblePart], batch: TokenBatch, fields: Sequence[str], cancelled: Callable[[], bool]
    ) -> dict[str, Scores]:
        """Return the scores of parts by name. Raises the first failure of a whole part, once all calls have ended."""
        calls = {
            part.name: self._threads[part.name].start(batch, fields, cancelled)
            for part in parts
            if part.name in self._threads
        }
        results: dict[str, Scores] = {}
        try:
            for part in parts:
                if part.name not in calls:
                    results[part.name] = part.source.score(batch, fields, cancelled)
        finally:
            # Also if a model fails: wait for every call.
            failures = [call.exception() for call in calls.values()]
        for failure in failures:
            if failure is not None:
                raise failure
        return results | {name: call.result() for name, call in calls.items()}

    def _used_weights(self, weights: Mapping[str, float] | None) -> Mapping[str, float]:
        if weights is None:
            return {part.name: part.weight for part in self._parts}
        names = [part.name for part in self._parts]
        if weights.keys() != set(names) or not any(weights.values()):
            given = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
            raise MismatchError(
                f"weights: got {given}; expected one for each of {', '.join(names)}, not all 0; "
                "start the reward service with the config of the run"
            )
        return weights

    def _sum(self, parts: Sequence[EnsemblePart], weights: Mapping[str, float], scores: Sequence[Scores]) -> FloatArray:
        """Return the weighted sum, NaN where a part that is not optional has no score."""
        total = np.zeros(len(scores[0].total), np.float64)
        for part, each in zip(parts, scores, strict=True):
            known = np.where(np.isnan(each.total), 0, each.total) if part.optional else each.total
            total += weights[part.name] * known.astype(np.float64)
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
            thread = self._threads.get(part.name)
            if thread is not None:
                thread.close()
            else:
                part.source.close()


def _model_shadow(part: EnsemblePart, batch: TokenBatch, fields: Sequence[str]) -> Scores:
    """Return the scores of a model that is a shadow, none if it fails. Other errors are those of the process: they are raised."""
    try:
        return part.source.score(batch, fields)
    except QuartetError as error:
        scores = failed_scores(error, len(batch))
        report(part.key, scores)
        return scores


def _first_failure(parts: Sequence[EnsemblePart], scores: Sequence[Scores], index: int) -> tuple[Outcome, str]:
    """Return the outcome of one sequence and its detail. A sum of no part at all is a refusal."""
    outcomes = [each.all_outcomes[index] for each in scores]
    left_out = [part.optional and each is Outcome.REFUSED for part, each in zip(parts, outcomes, strict=True)]
    for part, outcome, each, skipped in zip(parts, outcomes, scores, left_out, strict=True):
        if outcome is not Outcome.OK and (not skipped or all(left_out)):
            return outcome, each.all_details[index] or f"{part.key}: {outcome}"
    return Outcome.OK, ""
