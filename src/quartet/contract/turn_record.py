"""Recorded turns: what an episode needs to continue in another process, without generating a turn again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from quartet.contract.generation import GenerationBatch
from quartet.contract.trajectory import EnvironmentReply, FinishReason, Segment, TrajectoryId, VersionSpan


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn of the policy, as it is recorded before its answer leaves the process that generates.

    ``index`` counts the turns of the episode from 0, over all branches in order of arrival. ``segment`` has the generated tokens.
    ``finish_reason`` is eos or length. ``created`` is the time of the answer in seconds since 1970, or 0. ``request``: digest of
    the request of an agent that the turn answers; empty for an environment. ``details``: JSON that the process needs to give the
    answer again; empty for an environment. The other fields are those of ``Trajectory``.
    """

    index: int
    segment: Segment
    policy_version: int
    weights_digest: bytes
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...] = ()
    created: int = 0
    request: bytes = b""
    details: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The recorded turns of an episode, in order and without a gap, and the recorded replies of its environment.

    The first reply is that to the reset, before the first turn. An agent has none.
    """

    turns: tuple[RecordedTurn, ...] = ()
    replies: tuple[EnvironmentReply, ...] = ()


class EpisodeDiffers(Exception):
    """An environment answers otherwise than in the records of the episode that it should continue."""


def origins(batch: GenerationBatch) -> Mapping[TrajectoryId, str]:
    """Return the origin of each requested trajectory: a digest of its request, 32 hexadecimal digits.

    Records of other weights, another seed, other sampling settings or limits, or another prompt have another origin. What answers
    the policy is not part of it: its settings stay the same for the whole run, and a change of its code cannot be seen.
    """
    episode = batch.episode
    fields = episode.fields if episode is not None else {}
    limits = [episode.max_turns, episode.max_turn_tokens] if episode is not None else []
    common = [batch.seed, batch.policy_version, batch.weights_digest.hex(), asdict(batch.sampling), limits]
    start = hashlib.blake2b(json.dumps(common).encode(), digest_size=16)
    result = {}
    for request in batch.requests:
        digest = start.copy()
        digest.update(f"{request.id}/{request.greedy}/{fields.get(request.id.prompt, '')}/".encode())
        digest.update(request.prompt_ids.astype("<i4").tobytes())
        result[request.id] = digest.hexdigest()
    return result
