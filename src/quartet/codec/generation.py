"""Messages of GenerationService: requests, and the events of a generation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet.codec.checks import checked_digest
from quartet.codec.tensors import ints_from_proto, tensor_to_proto
from quartet.codec.trajectories import MAX_RESPONSE_TOKENS, sampling_from_proto, sampling_to_proto
from quartet.config.rollout import MAX_RESPONSES, MAX_TURNS
from quartet.contract.arrays import IntArray
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest
from quartet.contract.status import Role
from quartet.contract.trajectory import TrajectoryId
from quartet.contract.weights import WeightTransfer
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
    return generation_pb2.GenerateRequest(
        run=batch.run,
        step=batch.step,
        leader_epoch=batch.leader_epoch,
        prompt_ids=tensor_to_proto(np.concatenate(prompts) if prompts else np.zeros(0, np.int32)),
        prompt_lengths=tensor_to_proto(np.array([len(prompt) for prompt in prompts], np.int32)),
        prompts=list(positions),
        trajectory_prompts=[positions[request.id.prompt] for request in batch.requests],
        trajectory_samples=[request.id.sample for request in batch.requests],
        sampling=sampling_to_proto(batch.sampling),
        seed=batch.seed,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator=batch.generator,
        attempt=batch.attempt,
        trajectory_greedy=greedy if any(greedy) else [],
        episode=_episode_to_proto(batch.episode, list(positions)) if batch.episode else None,
    )


def _episode_to_proto(episode: EpisodeSettings, prompts: Sequence[int]) -> generation_pb2.EpisodeSettings:
    return generation_pb2.EpisodeSettings(
        max_turns=episode.max_turns,
        max_turn_tokens=episode.max_turn_tokens,
        fields=[episode.fields.get(prompt, "{}") for prompt in prompts],
    )


def _episode_from_proto(message: generation_pb2.EpisodeSettings, prompts: Sequence[int]) -> EpisodeSettings:
    if not 1 <= message.max_turns <= MAX_TURNS:
        raise InvalidRequest(f"episode.max_turns {message.max_turns}: expected 1 to {MAX_TURNS}")
    if message.max_turn_tokens > MAX_RESPONSE_TOKENS:
        raise InvalidRequest(f"episode.max_turn_tokens {message.max_turn_tokens}: expected 0 to {MAX_RESPONSE_TOKENS}")
    if len(message.fields) != len(prompts):
        raise InvalidRequest(f"episode.fields: expected {len(prompts)}, one per prompt, got {len(message.fields)}")
    return EpisodeSettings(message.max_turns, message.max_turn_tokens, dict(zip(prompts, message.fields, strict=True)))


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
    return GenerationBatch(
        run=message.run,
        step=message.step,
        leader_epoch=message.leader_epoch,
        requests=requests,
        sampling=sampling_from_proto(message.sampling),
        seed=message.seed,
        policy_version=message.policy_version,
        weights_digest=checked_digest(message.weights_digest, "weights_digest"),
        generator=message.generator,
        attempt=message.attempt,
        episode=_episode_from_proto(message.episode, message.prompts) if message.HasField("episode") else None,
    )


def generation_started_to_proto() -> generation_pb2.GenerateResponse:
    """Return the first event of a generation."""
    return generation_pb2.GenerateResponse(started=generation_pb2.GenerationStarted())


def generation_progress_to_proto(trajectories: int, response_tokens: int) -> generation_pb2.GenerateResponse:
    """Return an event in the middle of a generation."""
    progress = generation_pb2.GenerationProgress(trajectories=trajectories, response_tokens=response_tokens)
    return generation_pb2.GenerateResponse(progress=progress)


def generation_finished_to_proto(
    trajectories: int, response_tokens: int, seconds: float
) -> generation_pb2.GenerateResponse:
    """Return the last event of a generation."""
    finished = generation_pb2.GenerationFinished(
        trajectories=trajectories, response_tokens=response_tokens, seconds=seconds
    )
    return generation_pb2.GenerateResponse(finished=finished)


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
    return generation_pb2.UpdateWeightsRequest(
        run=update.run,
        leader_epoch=update.leader_epoch,
        policy_version=update.policy_version,
        weights_digest=update.weights_digest,
        sources=[
            generation_pb2.WeightPeer(address=address, generator=role is Role.GENERATOR)
            for role, address in update.sources
        ],
    )


def weight_update_from_proto(message: generation_pb2.UpdateWeightsRequest) -> WeightUpdate:
    """Convert and validate the arguments of an UpdateWeights call. Raises InvalidRequest."""
    if (
        not message.run
        or not 1 <= len(message.sources) <= MAX_SOURCES
        or not all(_HOST_PORT.fullmatch(source.address) for source in message.sources)
    ):
        raise InvalidRequest(f"update weights: expected a run, and 1 to {MAX_SOURCES} sources HOST:PORT")
    return WeightUpdate(
        message.run,
        message.leader_epoch,
        message.policy_version,
        checked_digest(message.weights_digest, "weights_digest", required=True),
        tuple((Role.GENERATOR if source.generator else Role.ACTOR, source.address) for source in message.sources),
    )


def weight_transfer_to_proto(transfer: WeightTransfer) -> generation_pb2.WeightTransfer:
    """Convert a transfer of weights."""
    return generation_pb2.WeightTransfer(
        policy_version=transfer.policy_version,
        weights_digest=transfer.weights_digest,
        source=transfer.source,
        bytes=transfer.bytes,
        delta=transfer.delta,
        transfer_seconds=transfer.transfer_seconds,
        load_seconds=transfer.load_seconds,
    )


def weight_transfer_from_proto(message: generation_pb2.WeightTransfer) -> WeightTransfer:
    """Convert a transfer of weights. Raises InvalidRequest."""
    return WeightTransfer(
        policy_version=message.policy_version,
        weights_digest=checked_digest(message.weights_digest, "weights_digest"),
        source=message.source,
        bytes=message.bytes,
        delta=message.delta,
        transfer_seconds=message.transfer_seconds,
        load_seconds=message.load_seconds,
    )


def weight_update_response_to_proto(transfer: WeightTransfer) -> generation_pb2.UpdateWeightsResponse:
    """Return the response to UpdateWeights."""
    return generation_pb2.UpdateWeightsResponse(transfer=weight_transfer_to_proto(transfer))


def updated_weights_from_proto(message: generation_pb2.UpdateWeightsResponse) -> WeightTransfer:
    """Return the transfer of the response to UpdateWeights. Raises InvalidRequest."""
    return weight_transfer_from_proto(message.transfer)
