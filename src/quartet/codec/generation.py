"""Messages of GenerationService."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quartet.codec.checks import check_digest
from quartet.codec.messages import from_message, to_message
from quartet.codec.tensors import ints_from_proto
from quartet.config.rollout import MAX_RESPONSES
from quartet.contract.arrays import IntArray
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest
from quartet.contract.status import Role
from quartet.contract.trajectory import TrajectoryId
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.v1 import generation_pb2

_HOST_PORT = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
"""No other kind of address, such as a Unix socket: a caller must not choose what this process connects to."""
MAX_SOURCES = 64
"""Maximum number of sources in a request for weights."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Arguments of one UpdateWeights call. See ``UpdateWeightsRequest`` in proto/quartet/v1/generation.proto."""

    run: str
    leader_epoch: int
    policy_version: int
    weights_digest: bytes
    sources: tuple[tuple[Role, str], ...]
    """Role and HOST:PORT of each source, in order of preference."""


def generation_batch_to_proto(batch: GenerationBatch) -> generation_pb2.GenerateRequest:
    """Convert the arguments of a Generate call."""
    positions: dict[int, int] = {}
    prompts: list[IntArray] = []
    for request in batch.requests:
        if request.id.prompt not in positions:
            positions[request.id.prompt] = len(prompts)
            prompts.append(request.prompt_ids)
    greedy = [request.greedy for request in batch.requests]
    fields = [batch.episode.fields.get(prompt, "{}") for prompt in positions] if batch.episode else []
    return to_message(
        generation_pb2.GenerateRequest,
        batch,
        prompt_ids=np.concatenate(prompts) if prompts else np.zeros(0, np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        prompts=list(positions),
        trajectory_prompts=[positions[request.id.prompt] for request in batch.requests],
        trajectory_samples=[request.id.sample for request in batch.requests],
        trajectory_greedy=greedy if any(greedy) else [],
        episode=replace(batch.episode, fields=fields) if batch.episode else None,  # type: ignore[arg-type]
    )


def generation_batch_from_proto(message: generation_pb2.GenerateRequest) -> GenerationBatch:
    """Convert and validate the arguments of a Generate call. Raises InvalidRequest."""
    lengths = ints_from_proto(message.prompt_lengths, "prompt_lengths", len(message.prompts))
    if not len(lengths) or lengths.min() < 1 or not message.run:
        raise InvalidRequest("generate: expected a run, and prompts of 1 token or more")
    if len(set(message.prompts)) != len(lengths):
        raise InvalidRequest("prompts: expected distinct indices, because trajectory ids derive from them")
    count = len(message.trajectory_prompts)
    if not 1 <= count <= MAX_RESPONSES or len(message.trajectory_samples) != count:
        raise InvalidRequest(
            f"generate: {count} trajectory_prompts and {len(message.trajectory_samples)} trajectory_samples; expected the same "
            f"number of both, 1 to {MAX_RESPONSES}"
        )
    if max(message.trajectory_prompts) >= len(lengths):
        raise InvalidRequest(f"trajectory_prompts: expected positions below the number of prompts, {len(lengths)}")
    flat = ints_from_proto(message.prompt_ids, "prompt_ids", int(lengths.sum(dtype=np.int64)))
    prompts = np.split(flat, np.cumsum(lengths)[:-1])
    greedy = message.trajectory_greedy or [False] * count
    if len(greedy) != count:
        raise InvalidRequest(
            f"trajectory_greedy: {len(greedy)} for {count} trajectories; expected one for each, or none"
        )
    requests = [
        GenerationRequest(
            TrajectoryId(message.run, message.step, message.prompts[position], sample), prompts[position], greedy=flag
        )
        for position, sample, flag in zip(message.trajectory_prompts, message.trajectory_samples, greedy, strict=True)
    ]
    if len({request.id for request in requests}) != count:
        raise InvalidRequest("generate: a pair of prompt and sample repeats; expected each trajectory once")
    return from_message(
        GenerationBatch,
        message,
        requests=requests,
        episode=_episode(message.episode, message.prompts) if message.HasField("episode") else None,
    )


def _episode(message: generation_pb2.EpisodeSettings, prompts: Sequence[int]) -> EpisodeSettings:
    if len(message.fields) != len(prompts):
        raise InvalidRequest(f"episode.fields: expected {len(prompts)}, one per prompt, got {len(message.fields)}")
    fields = dict(zip(prompts, message.fields, strict=True))
    return from_message(EpisodeSettings, message, "episode", fields=fields)


def generation_progress_from_proto(message: generation_pb2.GenerateResponse) -> tuple[int, int] | None:
    """Return the numbers of trajectories and response tokens of an event, or None if it has none."""
    event = message.WhichOneof("event")
    if event not in ("progress", "finished"):
        return None
    progress = getattr(message, event)
    return progress.trajectories, progress.response_tokens


def trajectories_from_proto(last: generation_pb2.GenerateResponse | None) -> int:
    """Return the number of trajectories from the last event of a generation. Raises ServiceFailed for another event, or none."""
    if last is None or last.WhichOneof("event") != "finished":
        raise ServiceFailed("Generate: the stream ended without the event `finished`")
    return last.finished.trajectories


def weight_update_to_proto(update: WeightUpdate) -> generation_pb2.UpdateWeightsRequest:
    """Convert the arguments of an UpdateWeights call."""
    message = to_message(generation_pb2.UpdateWeightsRequest, update, sources=[])
    for role, address in update.sources:
        message.sources.add(address=address, generator=role is Role.GENERATOR)
    return message


def weight_update_from_proto(message: generation_pb2.UpdateWeightsRequest) -> WeightUpdate:
    """Convert and validate the arguments of an UpdateWeights call. Raises InvalidRequest."""
    if (
        not message.run
        or not 1 <= len(message.sources) <= MAX_SOURCES
        or not all(_HOST_PORT.fullmatch(source.address) for source in message.sources)
    ):
        raise InvalidRequest(f"update weights: expected a run, and 1 to {MAX_SOURCES} sources HOST:PORT")
    check_digest(message.weights_digest, "weights_digest", required=True)
    sources = tuple((Role.GENERATOR if each.generator else Role.ACTOR, each.address) for each in message.sources)
    return from_message(WeightUpdate, message, sources=sources)
