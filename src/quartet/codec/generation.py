"""Messages of Generate: the request and the events of its response stream."""

from __future__ import annotations

import numpy as np

from quartet.codec.tensors import ints_from_proto, tensor_to_proto
from quartet.codec.trajectories import sampling_from_proto, sampling_to_proto
from quartet.config import MAX_RESPONSES
from quartet.errors import InvalidRequest, ServiceFailed
from quartet.types import GenerationBatch, Prompt
from quartet.v1 import actor_pb2


def generation_batch_to_proto(batch: GenerationBatch) -> actor_pb2.GenerateRequest:
    """Convert the arguments of a Generate call."""
    return actor_pb2.GenerateRequest(
        run=batch.run,
        step=batch.step,
        leader_epoch=batch.leader_epoch,
        prompt_ids=tensor_to_proto(np.concatenate([prompt.token_ids for prompt in batch.prompts])),
        prompt_lengths=tensor_to_proto(np.array([len(prompt.token_ids) for prompt in batch.prompts], np.int32)),
        prompts=[prompt.index for prompt in batch.prompts],
        samples_per_prompt=batch.samples_per_prompt,
        sampling=sampling_to_proto(batch.sampling),
        seed=batch.seed,
        policy_version=batch.policy_version,
        first_sample=batch.first_sample,
    )


def generation_batch_from_proto(message: actor_pb2.GenerateRequest) -> GenerationBatch:
    """Convert and validate the arguments of a Generate call. The prompts have no text and no fields. Raises InvalidRequest."""
    lengths = ints_from_proto(message.prompt_lengths, "prompt_lengths", len(message.prompts))
    if not len(lengths) or lengths.min() < 1 or not message.run or message.samples_per_prompt < 1:
        raise InvalidRequest(
            "generate: expected a run, samples_per_prompt of 1 or more, and prompts of 1 token or more"
        )
    if len(set(message.prompts)) != len(lengths):
        raise InvalidRequest("prompts: expected distinct indices, because trajectory ids derive from them")
    if len(lengths) * message.samples_per_prompt > MAX_RESPONSES:
        raise InvalidRequest(f"generate: expected at most {MAX_RESPONSES} trajectories")
    if message.first_sample + message.samples_per_prompt > 2**32:
        raise InvalidRequest(f"first_sample {message.first_sample}: expected the last sample's index to be below 2^32")
    flat = ints_from_proto(message.prompt_ids, "prompt_ids", int(lengths.sum(dtype=np.int64)))
    prompts = np.split(flat, np.cumsum(lengths)[:-1])
    return GenerationBatch(
        run=message.run,
        step=message.step,
        leader_epoch=message.leader_epoch,
        prompts=[Prompt(index, token_ids) for index, token_ids in zip(message.prompts, prompts, strict=True)],
        samples_per_prompt=message.samples_per_prompt,
        sampling=sampling_from_proto(message.sampling),
        seed=message.seed,
        policy_version=message.policy_version,
        first_sample=message.first_sample,
    )


def generation_started_to_proto() -> actor_pb2.GenerateResponse:
    """Return the first event of a generation."""
    return actor_pb2.GenerateResponse(started=actor_pb2.GenerationStarted())


def generation_finished_to_proto(trajectories: int, response_tokens: int, seconds: float) -> actor_pb2.GenerateResponse:
    """Return the last event of a generation."""
    finished = actor_pb2.GenerationFinished(trajectories=trajectories, response_tokens=response_tokens, seconds=seconds)
    return actor_pb2.GenerateResponse(finished=finished)


def trajectories_from_proto(last: actor_pb2.GenerateResponse | None) -> int:
    """Return the number of trajectories from the last event of a generation. Raises ServiceFailed for another event, or none."""
    if last is None or last.WhichOneof("event") != "finished":
        raise ServiceFailed("Generate: the stream ended without the event `finished`")
    return last.finished.trajectories
