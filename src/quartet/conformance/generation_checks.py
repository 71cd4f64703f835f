"""Checks of Generate: events, trajectories in the rollout stream, seeds, versions and fencing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from quartet.buffer.connection import Redis, connect
from quartet.codec.trajectories import trajectory_from_bytes
from quartet.conformance.batches import tensor
from quartet.conformance.check import Check, within
from quartet.conformance.model_checks import ACTOR_LOG_PROBS
from quartet.conformance.outcome import Skipped, Violation, expect
from quartet.conformance.target import Refusal, Target
from quartet.contract.status import Role
from quartet.contract.trajectory import FinishReason, Trajectory
from quartet.errors import InvalidRequest
from quartet.v1 import generation_pb2, trajectory_pb2

GENERATION = "proto/quartet/v1/generation.proto"
TRAJECTORY = "proto/quartet/v1/trajectory.proto"
SAMPLES = 2
RESPONSE_TOKENS = 6


@dataclass
class Generation:
    """A generation engine under test, in a run with a random name."""

    target: Target
    run: str
    epoch: int
    client: Redis
    version: int
    digest: bytes
    prompts: list[NDArray[np.int32]]

    def request(self, **changes: Any) -> Any:
        """Return a valid request for SAMPLES trajectories of each prompt. ``changes``: other fields."""
        sampling = trajectory_pb2.SamplingParameters(
            max_response_tokens=RESPONSE_TOKENS, temperature=changes.pop("temperature", 1.0), top_p=1.0
        )
        positions = [position for position in range(len(self.prompts)) for _ in range(SAMPLES)]
        given = {
            "run": self.run,
            "step": 1,
            "leader_epoch": self.epoch,
            "prompt_ids": tensor(np.concatenate(self.prompts)),
            "prompt_lengths": tensor(np.array([len(prompt) for prompt in self.prompts], np.int32)),
            # Indices of the data set, not positions in the request.
            "prompts": [7 + 3 * position for position in range(len(self.prompts))],
            "trajectory_prompts": positions,
            "trajectory_samples": [number % SAMPLES for number in range(len(positions))],
            "sampling": sampling,
            "seed": 5,
            "policy_version": self.version,
            "weights_digest": self.digest,
            "generator": "127.0.0.1:1" if self.digest else "",
            "attempt": 3,
        }
        return generation_pb2.GenerateRequest(**{**given, **changes})

    def events(self, request: Any) -> list[Any]:
        """Return the events of a call. Raises Violation if it fails."""
        target = self.target
        try:
            call = target.generation.Generate(
                request, timeout=target.limits.seconds, metadata=target.credentials.metadata
            )
            return list(call)
        except grpc.RpcError as error:
            raise Violation(f"a valid Generate call failed with {Refusal.of(error)}") from None

    def entries(self) -> list[dict[bytes, bytes]]:
        """Return and delete the entries of the rollout stream."""
        key = f"quartet:{self.run}:rollouts"
        response: Any = self.client.xrange(key)
        entries = [fields for _, fields in response]
        self.client.delete(key)
        return entries

    def trajectories(self, request: Any | None = None) -> dict[str, Trajectory]:
        """Generate, and return the trajectories by id. Raises Violation."""
        self.events(request or self.request())
        result: dict[str, Trajectory] = {}
        for entry in self.entries():
            name = entry.get(b"id", b"").decode()
            try:
                trajectory = trajectory_from_bytes(entry.get(b"trajectory", b""))
            except InvalidRequest as error:
                raise Violation(f"the entry {name!r} of the rollout stream is not a trajectory: {error}") from None
            expect(name not in result, f"the trajectory {name} is in the rollout stream twice")
            expect(name == str(trajectory.id), f"the field id is {name!r}, and the trajectory's id {trajectory.id}")
            result[name] = trajectory
        return result


@contextmanager
def generation(target: Target) -> Iterator[Generation]:
    """Yield the engine of a service. Deletes its trajectories at the end. Raises Skipped without a buffer or weights."""
    url = target.limits.buffer_url
    if url is None:
        raise Skipped("needs the service's buffer; give --buffer")
    status = target.status()
    version, digest = int(status.policy_version), b""
    if target.role is Role.GENERATOR:
        if not status.HasField("last_transfer"):
            raise Skipped("the generator holds no weights; load them with UpdateWeights first")
        version, digest = int(status.last_transfer.policy_version), status.last_transfer.weights_digest
    run, client = f"conformance-{secrets.token_hex(4)}", connect(url)
    prompts = [target.tokens(count) for count in (3, 1, 5)]
    try:
        yield Generation(target, run, int(status.leader_epoch) + 1, client, version, digest, prompts)
    finally:
        client.delete(f"quartet:{run}:rollouts")
        client.close()


def _events(each: Generation) -> None:
    events = each.events(each.request())
    kinds = [event.WhichOneof("event") for event in events]
    expect(kinds and kinds[0] == "started", f"the first event is {kinds[:1]}; expected started")
    expect(kinds[-1] == "finished", f"the last event is {kinds[-1]}; expected finished")
    middle = sorted(set(kinds[1:-1]))
    expect(middle in ([], ["progress"]), f"between the first and the last event are {middle}; expected progress")
    entries = each.entries()
    expected = len(each.prompts) * SAMPLES
    finished = events[-1].finished
    expect(
        finished.trajectories == expected, f"finished names {finished.trajectories} trajectories; expected {expected}"
    )
    expect(len(entries) == expected, f"the rollout stream has {len(entries)} entries; expected {expected}")
    tokens = sum(len(trajectory_from_bytes(entry[b"trajectory"]).response_ids) for entry in entries)
    expect(
        finished.response_tokens == tokens,
        f"finished names {finished.response_tokens} response tokens; expected {tokens}, those in the stream",
    )


def _ids(each: Generation) -> None:
    request = each.request()
    result = each.trajectories(request)
    expected = {
        f"{each.run}/1/{request.prompts[prompt]}/{sample}"
        for prompt, sample in zip(request.trajectory_prompts, request.trajectory_samples, strict=True)
    }
    expect(result.keys() == expected, f"the trajectories are {sorted(result)}; expected {sorted(expected)}")
    for trajectory in result.values():
        prompt = each.prompts[list(request.prompts).index(trajectory.id.prompt)]
        expect(np.array_equal(trajectory.prompt_ids, prompt), f"{trajectory.id} has another prompt than the request")


def _origin(each: Generation) -> None:
    request = each.request()
    each.events(request)
    for entry in each.entries():
        trajectory = trajectory_from_bytes(entry[b"trajectory"])
        epoch = entry.get(b"leader_epoch")
        expect(epoch == str(each.epoch).encode(), f"the field leader_epoch is {epoch!r}; expected {each.epoch}")
        for name in ("policy_version", "weights_digest", "generator", "attempt"):
            sent, stored = getattr(request, name), getattr(trajectory, name)
            expect(sent == stored, f"{name} of a trajectory is {stored!r}; expected {sent!r}, that of the request")


def _tokens(each: Generation) -> None:
    size = each.target.vocabulary_size
    for trajectory in each.trajectories().values():
        ids, log_probs = trajectory.response_ids, trajectory.log_probs
        expect(1 <= len(ids) <= RESPONSE_TOKENS, f"a response has {len(ids)} tokens; expected 1 to {RESPONSE_TOKENS}")
        expect(ids.min() >= 0 and ids.max() < size, "a response has a token id outside the vocabulary")
        expect(len(log_probs) in (0, len(ids)), f"{len(log_probs)} log-probs for {len(ids)} tokens")
        expect(not len(log_probs) or log_probs.max() <= 1e-4, "a log-prob is more than 0")
        if trajectory.finish_reason is FinishReason.LENGTH:
            expect(len(ids) == RESPONSE_TOKENS, f"a response of {len(ids)} tokens has the finish reason LENGTH")


def _log_probs(each: Generation) -> None:
    if each.target.role is not Role.ACTOR:
        raise Skipped("only an actor computes log-probs, too")
    result = list(each.trajectories().values())
    if not all(len(trajectory.log_probs) for trajectory in result):
        raise Skipped("the engine reports no log-probs")
    pairs = [(trajectory.prompt_ids, trajectory.response_ids) for trajectory in result]
    trained = ACTOR_LOG_PROBS.values(each.target, pairs)
    difference = float(np.abs(trained - np.concatenate([trajectory.log_probs for trajectory in result])).max())
    expect(difference < 0.05, f"log-probs at generation differ from those of LogProbs by {difference:.2g} nats")


def _require_same(first: dict[str, Trajectory], second: dict[str, Trajectory], message: str) -> None:
    same = first.keys() == second.keys() and all(
        np.array_equal(first[name].response_ids, second[name].response_ids) for name in first
    )
    expect(same, message)


def _require_seeded(each: Generation) -> None:
    engine = each.target.status().engine
    if not engine.seeded or not engine.batch_invariant:
        raise Skipped(f"engine {engine.name} is not seeded and batch-invariant, as its status says")


def _repeatable(each: Generation) -> None:
    _require_seeded(each)
    _require_same(each.trajectories(), each.trajectories(), "a repeated request gives other responses")


def _split(each: Generation) -> None:
    _require_seeded(each)
    whole = each.trajectories()
    request = each.request()
    last = len(request.trajectory_prompts) - 1
    one = each.request(
        trajectory_prompts=request.trajectory_prompts[last:], trajectory_samples=request.trajectory_samples[last:]
    )
    part = each.trajectories(one)
    _require_same(
        {name: whole[name] for name in part}, part, "a trajectory differs when it is generated without the others"
    )


def _seeds(each: Generation) -> None:
    _require_seeded(each)
    first, second = each.trajectories(), each.trajectories(each.request(seed=6))
    differs = any(not np.array_equal(first[name].response_ids, second[name].response_ids) for name in first)
    expect(differs, "another seed gives the same responses")


def _greedy(each: Generation) -> None:
    responses: dict[int, list[Trajectory]] = {}
    greedy = each.trajectories(each.request(temperature=0.0))
    for trajectory in greedy.values():
        responses.setdefault(trajectory.id.prompt, []).append(trajectory)
    for samples in responses.values():
        same = all(np.array_equal(samples[0].response_ids, other.response_ids) for other in samples)
        expect(same, "two greedy responses to a prompt differ")
    request = each.request()
    request.trajectory_greedy.extend(sample == 0 for sample in request.trajectory_samples)
    for name, trajectory in each.trajectories(request).items():
        same = np.array_equal(trajectory.response_ids, greedy[name].response_ids)
        expect(same or trajectory.id.sample > 0, "trajectory_greedy gives another response than temperature 0")


def _refused(each: Generation, request: Any, code: grpc.StatusCode, what: str) -> Refusal:
    refusal = each.target.refusal(each.target.generation.Generate, request)
    expect(refusal.code is code, f"{what} is refused with {refusal}; expected {code.name}")
    expect(not each.entries(), f"{what} was refused, but wrote trajectories")
    return refusal


def _fencing(each: Generation) -> None:
    each.trajectories(each.request(leader_epoch=each.epoch + 5))
    stale = _refused(each, each.request(), grpc.StatusCode.FAILED_PRECONDITION, "a lower leader_epoch than before")
    expect(stale.reason in ("", "StaleLeaderEpoch"), f"ErrorInfo.reason is {stale.reason}; expected StaleLeaderEpoch")


def _version(each: Generation) -> None:
    other = each.request(policy_version=each.version + 7)
    _refused(each, other, grpc.StatusCode.FAILED_PRECONDITION, "a policy_version that the engine does not hold")
    digest = each.request(weights_digest=bytes(16))
    _refused(each, digest, grpc.StatusCode.FAILED_PRECONDITION, "a weights_digest that the engine does not hold")


def _invalid(each: Generation) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    none = each.request()
    none.sampling.max_response_tokens = 0
    _refused(each, none, invalid, "max_response_tokens 0")
    _refused(each, each.request(prompts=[7, 7, 7]), invalid, "an index of a prompt that repeats")
    _refused(
        each, each.request(trajectory_samples=[0] * len(each.prompts) * SAMPLES), invalid, "a trajectory that repeats"
    )
    _refused(each, each.request(trajectory_prompts=[99] * len(each.prompts) * SAMPLES), invalid, "an unknown prompt")
    _refused(each, each.request(run=""), invalid, "a request without a run")
    size = each.target.vocabulary_size
    one = {"prompt_ids": tensor([size]), "prompt_lengths": tensor([1]), "prompts": [7]}
    unknown = each.request(**one, trajectory_prompts=[0], trajectory_samples=[0])
    _refused(each, unknown, invalid, "a prompt with a token id outside the vocabulary")


def _cancel(each: Generation) -> None:
    target = each.target
    for _ in range(2):
        call = target.generation.Generate(
            each.request(), timeout=target.limits.seconds, metadata=target.credentials.metadata
        )
        time.sleep(0.02)
        call.cancel()
    if not target.wait_for(lambda: target.status().work_pending == 0, target.limits.seconds):
        raise Violation("work_pending is not 0 after cancelled calls")
    each.entries()
    expected = len(each.prompts) * SAMPLES
    count = len(each.trajectories(each.request(leader_epoch=each.epoch, step=2)))
    expect(count == expected, f"after cancelled calls, a call gives {count} trajectories; expected {expected}")


_LISTED: list[tuple[str, str, str, Callable[[Generation], None]]] = [
    (
        "generate.events",
        "The events are started, any progress, and finished with the right numbers.",
        GENERATION,
        _events,
    ),
    (
        "generate.ids",
        "Each requested trajectory is in the rollout stream once, with its id and prompt.",
        TRAJECTORY,
        _ids,
    ),
    (
        "generate.origin",
        "A trajectory has the version, digest, generator, attempt and epoch of the request.",
        TRAJECTORY,
        _origin,
    ),
    ("generate.tokens", "Token ids, lengths, log-probs and finish reasons fit the request.", TRAJECTORY, _tokens),
    ("generate.log_probs", "Log-probs at generation are those of LogProbs, up to rounding.", TRAJECTORY, _log_probs),
    ("generate.repeatable", "A seeded engine gives the same responses to a repeated request.", GENERATION, _repeatable),
    (
        "generate.split",
        "The other trajectories of a request do not change one of a batch-invariant engine.",
        GENERATION,
        _split,
    ),
    ("generate.seeds", "Another seed gives other responses.", GENERATION, _seeds),
    ("generate.greedy", "Temperature 0 and trajectory_greedy select the most probable token.", TRAJECTORY, _greedy),
    ("generate.fencing", "A lower leader_epoch than the highest seen is refused.", GENERATION, _fencing),
    (
        "generate.version",
        "A policy version or digest that the engine does not hold is FAILED_PRECONDITION.",
        GENERATION,
        _version,
    ),
    ("generate.invalid", "Invalid requests are INVALID_ARGUMENT, and write nothing.", GENERATION, _invalid),
    ("generate.cancel", "A cancelled call ends, and later calls are complete.", GENERATION, _cancel),
]


def generation_checks() -> list[Check]:
    """Return the checks of a generation engine."""
    return [
        Check(name, requirement, source, within(generation, check), changes_state=True)
        for name, requirement, source, check in _LISTED
    ]
