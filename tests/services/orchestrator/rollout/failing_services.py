"""Scoring services that fail for chosen trajectories, and the collection of a step with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import RecoveryConfig
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.status import Role
from quartet.contract.trajectory import Scores, TokenBatch, Trajectory
from quartet.errors import QuartetError
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector, ReplacementRule
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from tests.buffer.samples import trajectory
from tests.services.orchestrator.fake_services import FakeCall, FakeGeneration, responses

BACKOFF = 1e-6
Name = tuple[int, int]
"""The indices of prompt and sample."""

SERVICES = ("score", "log_probs", "values")
ALWAYS = 1_000_000


def recovery_config(**changes: Any) -> RecoveryConfig:
    """Return a config with negligible pauses."""
    return RecoveryConfig(backoff_seconds=BACKOFF, **changes)


def sampled(run: str, prompt: int, sample: int = 0) -> Trajectory:
    """Return a trajectory whose tokens encode prompt and sample: its first token and its response length."""
    return trajectory(run, prompt, sample=sample, response=3 + sample)


def names(batch: TokenBatch) -> list[Name]:
    first = [int(sequence[0]) - 1 for sequence in batch.sequences()]
    return list(zip(first, (batch.response_lengths - 3).tolist(), strict=True))


def ended_generation() -> FakeGeneration:
    generation = FakeGeneration()
    generation.complete()
    return generation


def batch_of(trajectories: list[Trajectory]) -> GenerationBatch:
    """Return the request for these trajectories, by policy version 0."""
    id = trajectories[0].id
    requests = [GenerationRequest(item.id, item.prompt_ids) for item in trajectories]
    return GenerationBatch(id.run, id.step, 1, requests, SamplingParameters(9), 0, 0)


class FailingScorer:
    """Reward, reference and critic in one. Each fails a number of times for some trajectories."""

    role = Role.REFERENCE

    def __init__(self, error: QuartetError, blocked: bool = False, **failures: dict[Name, int]) -> None:
        """Set ``failures``: counts by service and trajectory. With ``blocked``, the test completes the calls."""
        self._error, self._blocked = error, blocked
        self._failures = {service: dict(failures.get(service, {})) for service in SERVICES}
        self.requests: dict[str, list[list[Name]]] = {service: [] for service in SERVICES}
        self.calls: dict[str, list[FakeCall]] = {service: [] for service in SERVICES}
        self.fields: list[list[str]] = []

    def replicas(self) -> int:
        return 1

    def start(self, begin: Callable[[Any], Any]) -> Any:
        return begin(self)

    def _call(self, service: str, batch: TokenBatch, compute: Callable[[], Any]) -> Any:
        batch_names, failures, fails = names(batch), self._failures[service], False
        self.requests[service].append(batch_names)
        for name in batch_names:
            if failures.get(name, 0) > 0:
                failures[name] -= 1
                fails = True
        call = FakeCall(compute)
        self.calls[service].append(call)
        if fails:
            # The outcome is decided now and reported when the call completes.
            call.complete = lambda error=None: FakeCall.complete(call, error or self._error_for(batch_names))  # type: ignore[method-assign]
        if not self._blocked:
            call.complete()
        return call

    def _error_for(self, batch_names: list[Name]) -> QuartetError:
        return type(self._error)(f"{self._error} of {len(batch_names)}")

    def score(self, batch: TokenBatch, fields: Sequence[str] = (), weights: Any = None) -> Any:
        self.fields.append(list(fields))
        result = np.array([prompt + sample / 8 for prompt, sample in names(batch)], np.float32)
        return self._call("score", batch, lambda: Scores(result, {"half": result / 2}))

    def log_probs(self, batch: TokenBatch, temperature: float, version: Any = None) -> Any:
        return self._call("log_probs", batch, lambda: -responses(batch))

    def values(self, batch: TokenBatch, policy_version: int | None = None) -> Any:
        return self._call("values", batch, lambda: 2 * responses(batch))


class Actor:
    """Fake actor that writes the requested samples into the stream and records the requests."""

    def __init__(self, stream: RolloutStream, run: str, failure: Exception | None = None) -> None:
        self._stream, self._run, self._failure = stream, run, failure
        self.requests: list[tuple[set[int], int]] = []
        self.greedy: list[set[int]] = []

    def generate(
        self, first_samples: Mapping[int, int], greedy: Collection[int] = ()
    ) -> tuple[GenerationBatch, FakeGeneration]:
        prompts, [sample] = set(first_samples), set(first_samples.values())
        self.requests.append((prompts, sample))
        self.greedy.append(set(greedy))
        assert len(self.requests) < 20, self.requests
        requested = [sampled(self._run, prompt, sample) for prompt in sorted(prompts)]
        generation = FakeGeneration()
        if self._failure is None:
            self.write(requested)
        generation.complete(self._failure)
        batch = batch_of(requested)
        marked = [replace(request, greedy=request.id.prompt in greedy) for request in batch.requests]
        return replace(batch, requests=marked), generation

    def write(self, requested: list[Trajectory]) -> None:
        self._stream.append(requested)


def collect(
    stream: RolloutStream,
    scorer: FailingScorer,
    written: list[Trajectory],
    actor: Actor,
    score_batch_size: int = 3,
    recovery: RecoveryConfig | None = None,
    progress: list[int] | None = None,
    fields: dict[int, str] | None = None,
    greedy: Collection[Name] = (),
    kept_samples: int = 0,
) -> CollectedStep:
    stream.append(written)
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    collector = Collector(stream, services, score_batch_size)
    try:
        batch = batch_of(written)
        requests = [replace(item, greedy=(item.id.prompt, item.id.sample) in greedy) for item in batch.requests]
        return collector.collect(
            replace(batch, requests=requests, episode=EpisodeSettings(4, kept_samples=kept_samples)),
            ended_generation(),
            (progress if progress is not None else []).append,
            fields,
            ReplacementRule(recovery or recovery_config(), actor.generate),
        )
    finally:
        collector.reset()


def scored(step: CollectedStep) -> list[Name]:
    return [(item.trajectory.id.prompt, item.trajectory.id.sample) for item in step.scored]


def failed_trajectories(step: CollectedStep) -> list[tuple[Name, int]]:
    return [
        ((item.trajectory.id.prompt, item.trajectory.id.sample), item.attempts) for item in step.failed_trajectories
    ]


def assert_own_results(step: CollectedStep) -> None:
    for item in step.scored:
        id, response = item.trajectory.id, item.trajectory.response_ids.astype(np.float32)
        assert item.score == id.prompt + id.sample / 8
        assert item.parts == {"half": item.score / 2}
        np.testing.assert_array_equal(item.reference_log_probs, -response)
        np.testing.assert_array_equal(item.values, 2 * response)
