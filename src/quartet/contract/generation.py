"""Requests for generation, and the properties that an engine declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import Prompt, TrajectoryId


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes of the logits of tokens that have occurred, before the temperature, as in vLLM.

    ``repetition``: positive logits of tokens in the prompt or the response are divided by it, others multiplied; 1 is off.
    ``presence`` is subtracted from the logits of tokens in the response, and ``frequency`` for each occurrence; 0 is off. With
    turns, the response is the turn, and the prompt is all before it.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @classmethod
    def of(cls, repetition: float, presence: float, frequency: float) -> Penalties | None:
        """Return the penalties, or None if all are off."""
        penalties = cls(repetition, presence, frequency)
        return None if penalties == cls() else penalties

    @property
    def arguments(self) -> dict[str, float]:
        """The penalties by the names that the sampling parameters of vLLM and SGLang have."""
        return {
            "repetition_penalty": self.repetition,
            "presence_penalty": self.presence,
            "frequency_penalty": self.frequency,
        }


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that a response must have. ``value``: a JSON schema as JSON, a regular expression, or a grammar in EBNF."""

    kind: Literal["json_schema", "regex", "grammar"]
    value: str


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling of response tokens. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``stop_strings``: a response ends after the token that completes one of them in its text. ``penalties``: None is off.
    ``structured_output``: the form of each response, or of each turn; None for any.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    penalties: Penalties | None = None
    structured_output: StructuredOutput | None = None

    @property
    def reshapes(self) -> bool:
        """Return whether penalties, a form, top_k, top_p or min_p change the distribution.

        Greedy sampling ignores the last three.
        """
        truncates = self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        return truncates or self.penalties is not None or self.structured_output is not None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One trajectory, or one turn of it, to generate. Its random stream depends on (seed, step, prompt, sample, turn) only.

    ``prompt_ids``: all tokens before the turn. ``turn`` counts from 0. ``max_tokens`` limits the turn; 0 leaves the limit to the
    sampling parameters. ``greedy``: take the likeliest token at each position, after penalties, with its log-prob at temperature
    1.
    """

    id: TrajectoryId
    prompt_ids: IntArray
    turn: int = 0
    max_tokens: int = 0
    greedy: bool = False

    def own_sampling(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return ``sampling`` with the token limit of this request, at temperature 0 if it is greedy."""
        limit = self.max_tokens or sampling.max_response_tokens
        if limit == sampling.max_response_tokens and not self.greedy:
            return sampling
        if self.greedy:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return replace(sampling, max_response_tokens=limit)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """Settings of episodes with an environment.

    ``max_turns`` limits the turns of a trajectory. ``max_turn_tokens`` limits the tokens of one turn; 0 leaves the limit to the
    sampling parameters, which limits all tokens after the prompt, observations included. ``fields`` are the prompts' own fields,
    JSON objects by prompt index, for the environment. ``kept_samples``: number of trajectories of each prompt that the step
    keeps, those with the lowest ``consumption``; 0 keeps all.
    """

    max_turns: int
    max_turn_tokens: int = 0
    fields: Mapping[int, str] = field(default_factory=dict)
    kept_samples: int = 0


@dataclass(frozen=True, slots=True)
class GenerationBatch:
    """Arguments of one Generate call.

    ``requests``: the trajectories, all of ``run`` and ``step``. ``policy_version`` is the number of updates that the policy must
    have taken. ``weights_digest``: the digest that the generator's weights must have, 16 bytes; empty for a generator that shares
    the weights of the actor. ``generator``: name that its trajectories carry, HOST:PORT; empty for the actor. ``attempt``: number
    of this call, which its trajectories carry, too. ``episode``: settings of episodes with the environment; None generates one
    response to each prompt.
    """

    run: str
    step: int
    leader_epoch: int
    requests: Sequence[GenerationRequest]
    sampling: SamplingParameters
    seed: int
    policy_version: int
    weights_digest: bytes = b""
    generator: str = ""
    attempt: int = 0
    episode: EpisodeSettings | None = None


def requests_of(
    run: str, step: int, prompts: Sequence[Prompt], samples: int, first_sample: int = 0, greedy: int = 0
) -> list[GenerationRequest]:
    """Return one request per trajectory: prompt after prompt, each with its samples from ``first_sample`` on.

    After them, each prompt has ``greedy`` greedy ones.
    """
    end = first_sample + samples
    return [
        GenerationRequest(TrajectoryId(run, step, prompt.index, sample), prompt.token_ids, greedy=sample >= end)
        for prompt in prompts
        for sample in range(first_sample, end + greedy)
    ]


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """Guarantees of a generation engine. The orchestrator relies on them, so an engine declares only what it keeps."""

    name: str
    seeded: bool
    """True if the seed of a trajectory decides its random numbers."""
    batch_invariant: bool
    """True if the other requests in a batch change no bit of a response."""
    log_probs: Literal["whole", "truncated", "none"]
    """Distribution of the log-probs of the sampled tokens, at the sampling temperature: the whole one, the one after
    penalties, top_k, top_p and min_p, or none if the engine reports none or others."""
    weights: Literal["shared", "tensors", "folder", "adapter", "restart", "static"]
    """Way of a new policy version into the engine."""
    digest: Literal["read back", "reported", "none"]
    """Origin of the digest: read back from the weights that the engine holds after loading, reported by a server, or none."""
    in_flight_updates: bool = False
    """True if new weights may arrive in the middle of a response."""
    trial: str = ""
    """Result of the trial of batch invariance at the engine's start and the processor, or the reason for no trial; empty for an
    engine that is not tried."""
    trial_digest: str = ""
    """Digest of the logits of the trial, in hexadecimal. Engines with the same model and equal digests round in the same way."""
