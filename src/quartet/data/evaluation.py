"""Evaluation: compare greedy and sampled responses of a policy with those of the initial policy, on fixed prompts.

This module does not run models. The caller supplies responses and scores: from the services in a run, or from local models in
`quartet evaluate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np

from quartet.config.rewards import ENVIRONMENT_PART
from quartet.config.rollout import RolloutConfig
from quartet.config.root import Config
from quartet.contract.arrays import FloatArray, IntArray
from quartet.contract.generation import EpisodeSettings, Penalties, SamplingParameters, StructuredOutput
from quartet.contract.trajectory import FinishReason, Prompt, Trajectory
from quartet.data.prompt_cache import load_prompts
from quartet.data.prompt_encoding import PromptEncoder, PromptSet, select_prompts
from quartet.data.prompt_settings import NO_REVISIONS, PromptSettings
from quartet.errors import ComputationFailed, ConfigError, FunctionFailed, ScorerFailed

NO_PARTS: Mapping[str, float] = MappingProxyType({})
STEP = 0
"""Step in the ids of evaluation trajectories. All evaluations use the same random numbers, which differ from those of
training."""


def read_training_prompts(
    config: Config,
    load_tokenizer: Callable[[], Any],
    vocabulary_size: int,
    report: Callable[[str], None] = lambda _: None,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> list[PromptSet]:
    """Return the usable prompts of ``data.prompts`` or of each of ``data.sets``, tokenized for the actor.

    ``load_tokenizer`` is called if the prompts are not in the user's cache. ``report`` gets lines of progress. ``revisions`` of
    data sets on the hub, by key. The rows of all sets are numbered one set after the other. Raises ConfigError.
    """
    sets: list[PromptSet] = []
    num_rows = 0
    for settings in PromptSettings.for_training(config, revisions):
        read = read_prompts(settings, load_tokenizer, vocabulary_size, report)
        shifted = [replace(prompt, index=num_rows + prompt.index) for prompt in read.prompts] if sets else read.prompts
        sets.append(replace(read, prompts=shifted))
        num_rows += read.num_rows
    return sets


def read_validation_prompts(
    config: Config,
    load_tokenizer: Callable[[], Any],
    vocabulary_size: int,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> PromptSet:
    """Return the first ``evaluation.max_prompts`` usable validation prompts, tokenized for the actor.

    ``load_tokenizer`` is called if the prompts are not in the user's cache. ``revisions`` of data sets on the hub, by key. Raises
    ConfigError.
    """
    settings = PromptSettings.for_validation(config, revisions)
    if settings is None:
        raise ConfigError(
            "data.validation: null, so there are no prompts to evaluate on; set it to a file of prompts, or data.validation_set"
        )
    return read_prompts(settings, load_tokenizer, vocabulary_size)


def read_prompts(
    settings: PromptSettings,
    load_tokenizer: Callable[[], Any],
    vocabulary_size: int,
    report: Callable[[str], None] = lambda _: None,
) -> PromptSet:
    """Return the usable prompts of one file or data set, tokenized. See ``read_training_prompts``. Raises ConfigError."""

    def make_encoder() -> tuple[PromptEncoder, frozenset[int]]:
        tokenizer = load_tokenizer()
        return PromptEncoder.of(tokenizer, settings.model), frozenset({tokenizer.eos_token_id} - {None})

    return select_prompts(load_prompts(settings, make_encoder, report), settings, vocabulary_size)


def stream_name(run: str) -> str:
    """Return the run name in the ids of evaluation trajectories. The colon keeps it distinct from the name of any run."""
    return f"{run}:evaluation"


def greedy_sampling(rollout: RolloutConfig) -> SamplingParameters:
    """Return the settings for greedy responses. Its penalties and form apply to them, too, as in vLLM."""
    return SamplingParameters(
        rollout.max_response_tokens,
        temperature=0.0,
        stop_strings=rollout.stop_strings,
        penalties=_penalties(rollout),
        structured_output=_structured_output(rollout),
    )


def run_sampling(rollout: RolloutConfig) -> SamplingParameters:
    """Return the sampling settings of the run."""
    return SamplingParameters(
        rollout.max_response_tokens,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        min_p=rollout.min_p,
        stop_strings=rollout.stop_strings,
        penalties=_penalties(rollout),
        structured_output=_structured_output(rollout),
    )


def _structured_output(rollout: RolloutConfig) -> StructuredOutput | None:
    output = rollout.structured_output
    return None if output is None else StructuredOutput(output.kind, output.value)


def _penalties(rollout: RolloutConfig) -> Penalties | None:
    return Penalties.of(rollout.repetition_penalty, rollout.presence_penalty, rollout.frequency_penalty)


def episode_settings(rollout: RolloutConfig, prompts: Sequence[Prompt]) -> EpisodeSettings | None:
    """Return the settings of the run's episodes with ``prompts``, or None if they have no turns."""
    if not rollout.max_turns:
        return None
    fields = {prompt.index: prompt.fields for prompt in prompts}
    kept = rollout.samples_per_prompt if rollout.extra_samples else 0
    return EpisodeSettings(rollout.max_turns, rollout.max_turn_tokens or 0, fields, kept)


def texts_of(tokenizer: Any, token_ids: Sequence[IntArray], special_tokens: bool) -> list[str]:
    """Decode each sequence without clean-up. Keep special tokens in prompts, where they separate chat turns, but not in
    responses."""
    texts: list[str] = tokenizer.batch_decode(
        token_ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
    )
    return texts


@dataclass(frozen=True, slots=True)
class Response:
    """A response with its metrics.

    ``text`` is that of the last branch. ``score`` is in units of reward, None in a run without scores. ``tokens``: number of the
    policy's tokens. ``finished``: the model or the environment ended the response, not a limit. ``kl``: sum of
    log π − log π_ref over these tokens, in nats; None for greedy responses, for which it is not an estimate of the KL. ``parts``:
    unweighted scores of an ensemble's sources by name, as far as there are any. ``branches``: number of token sequences of the
    episode.
    """

    text: str
    score: float | None
    tokens: int
    finished: bool
    kl: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    branches: int = 1

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        text: str,
        score: float | None,
        reference_log_probs: FloatArray | None = None,
        parts: Mapping[str, float] = NO_PARTS,
    ) -> Response:
        """Create a response from a trajectory. ``reference_log_probs``: float32 [response tokens], for sampled responses."""
        kl = None
        if reference_log_probs is not None:
            own = trajectory.response_mask
            difference = trajectory.log_probs[own].astype(np.float64) - reference_log_probs[own].astype(np.float64)
            kl = float(np.sum(difference))
        finished = trajectory.finish_reason is not FinishReason.LENGTH
        return cls(text, score, len(trajectory.policy_ids), finished, kl, parts, len(trajectory.branches))


@dataclass(frozen=True, slots=True)
class PromptResponses:
    """Responses of one policy to one prompt: a greedy one, and one with the sampling settings of the run."""

    prompt: str
    greedy: Response
    sampled: Response


@dataclass(frozen=True, slots=True)
class Comparison:
    """Responses of the policy and the initial policy to the prompt with this ``index`` in its file.

    ``judge`` is in [0, 1], where 1 means that the judge prefers the sampled response of the policy. None without a judge.
    """

    index: int
    policy: PromptResponses
    initial: PromptResponses
    judge: float | None = None

    @property
    def win_greedy(self) -> float | None:
        """1 if the greedy response scores higher than that of the initial policy, 0 if lower, 0.5 for a tie.

        None without scores.
        """
        return win(self.policy.greedy.score, self.initial.greedy.score)

    @property
    def win_sampled(self) -> float | None:
        """1 if the sampled response scores higher than that of the initial policy, 0 if lower, 0.5 for a tie.

        None without scores.
        """
        return win(self.policy.sampled.score, self.initial.sampled.score)


class Worker(Protocol):
    """Process that calls a user's function, see ``quartet.system.user_function.FunctionWorker``."""

    def call(
        self, arguments: Sequence[Any], timeout: float, about: str = "", keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result, a JSON value. Raises FunctionFailed if the call takes more than ``timeout`` seconds."""

    def close(self) -> None:
        """End the process. May be called again."""


class Judge:
    """The function ``evaluation.judge``, f(prompt, response, initial_response, fields), which compares two responses."""

    def __init__(self, function: str, worker: Worker, timeout: float) -> None:
        """``timeout``: time limit for one call, in seconds."""
        self._function, self._worker, self._timeout = function, worker, timeout

    def preference(self, number: int, prompt: str, response: str, initial_response: str, fields: str) -> float:
        """Return the preference in [0, 1], where 1 means that ``response`` is better. Equal responses are a tie without a call.

        ``number`` is the line of the prompt, for messages. ``fields`` is a JSON object. Raises FunctionFailed if the function
        fails or returns anything else.
        """
        if response == initial_response:
            return 0.5
        arguments = [prompt, response, initial_response, json.loads(fields)]
        preference = self._worker.call(arguments, self._timeout, f"prompt {number}")
        if isinstance(preference, bool) or not isinstance(preference, int | float) or not 0 <= preference <= 1:
            # Text is not quoted, as it may be from the prompt.
            quotable = isinstance(preference, bool | int | float | None)
            shown = repr(preference) if quotable else f"a {type(preference).__name__}"
            raise FunctionFailed(
                f"evaluation.judge {self._function}, prompt {number}: returned {shown}, "
                "expected a number from 0 to 1, 1 if the response is better than the initial one"
            )
        return float(preference)


def win(score: float | None, other: float | None) -> float | None:
    """Return 1 if ``score`` is higher than ``other``, 0 if it is lower, 0.5 for a tie, None without scores."""
    if score is None or other is None:
        return None
    return 1.0 if score > other else 0.5 if score == other else 0.0


def compare(
    prompts: Sequence[Prompt],
    policy: Mapping[int, PromptResponses],
    initial: Mapping[int, PromptResponses],
    judge: Judge | None,
) -> list[Comparison]:
    """Pair the responses of the policy and the initial policy, both by prompt index.

    Raises ConfigError if the initial policy responded to another prompt, and ComputationFailed if the judge fails.
    """
    comparisons = []
    for prompt in prompts:
        ours, theirs = policy[prompt.index], initial.get(prompt.index)
        if theirs is None or theirs.prompt != ours.prompt:
            raise ConfigError(
                f"data.validation: prompt {prompt.index + 1} differs from the one in the evaluation before the "
                "first step; restore the file, data.max_prompt_tokens and evaluation.max_prompts of that time"
            )
        preference = None
        if judge is not None:
            preference = judge.preference(
                prompt.index + 1, ours.prompt, ours.sampled.text, theirs.sampled.text, prompt.fields
            )
        comparisons.append(Comparison(prompt.index, ours, theirs, preference))
    return comparisons


def summarize(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Return the means over all prompts, by metric name: scores in units of reward, KL in nats per response, lengths in tokens.

    Metrics of scores are absent without scores, and that of the judge without a judge. ``eval_eos_rate`` covers the sampled
    responses, like ``eos_rate``. Raises ComputationFailed if a mean is not finite.
    """
    greedy = [item.policy.greedy for item in comparisons]
    sampled = [item.policy.sampled for item in comparisons]
    values: dict[str, list[float | None]] = {
        "eval_reward_greedy": [response.score for response in greedy],
        "eval_reward_sampled": [response.score for response in sampled],
        "eval_kl": [response.kl or 0.0 for response in sampled],
        "eval_tokens_greedy": [response.tokens for response in greedy],
        "eval_tokens_sampled": [response.tokens for response in sampled],
        "eval_eos_rate": [response.finished for response in sampled],
        "eval_win_rate_greedy": [item.win_greedy for item in comparisons],
        "eval_win_rate_sampled": [item.win_sampled for item in comparisons],
        "eval_judge_win_rate": [item.judge for item in comparisons],
    }
    given = {name: [value for value in each if value is not None] for name, each in values.items()}
    means = {name: fmean(each) for name, each in given.items() if each}
    for name, value in means.items():
        if not math.isfinite(value):
            raise ComputationFailed(f"evaluation: {name} is {value}; a score or log-prob is not finite")
    return means


def row(comparison: Comparison) -> dict[str, Any]:
    """Return the record of one prompt in ``evaluations/step-000000.jsonl``."""
    policy, initial = comparison.policy, comparison.initial
    return {
        "index": comparison.index,
        "prompt": policy.prompt,
        "greedy": policy.greedy.text,
        "sampled": policy.sampled.text,
        "score_greedy": policy.greedy.score,
        "score_sampled": policy.sampled.score,
        "kl": policy.sampled.kl,
        "tokens_greedy": policy.greedy.tokens,
        "tokens_sampled": policy.sampled.tokens,
        "finished_greedy": policy.greedy.finished,
        "finished_sampled": policy.sampled.finished,
        "initial_greedy": initial.greedy.text,
        "initial_sampled": initial.sampled.text,
        "initial_score_greedy": initial.greedy.score,
        "initial_score_sampled": initial.sampled.score,
        "win_greedy": comparison.win_greedy,
        "win_sampled": comparison.win_sampled,
        "judge": comparison.judge,
        **({"parts_greedy": dict(policy.greedy.parts)} if policy.greedy.parts else {}),
        **({"parts_sampled": dict(policy.sampled.parts)} if policy.sampled.parts else {}),
        **({"branches_greedy": policy.greedy.branches} if policy.greedy.branches > 1 else {}),
        **({"branches_sampled": policy.sampled.branches} if policy.sampled.branches > 1 else {}),
    }


def responses_of(rows: Sequence[Mapping[str, Any]], source: str) -> dict[int, PromptResponses]:
    """Read the responses of the policy from the records of an evaluation, by prompt index. Raises ConfigError for a damaged
    record."""
    responses = {}
    for number, item in enumerate(rows, 1):
        try:
            greedy, sampled = (
                Response(
                    text=_typed(item[kind], str),
                    score=None if item[f"score_{kind}"] is None else float(item[f"score_{kind}"]),
                    tokens=_typed(item[f"tokens_{kind}"], int),
                    finished=_typed(item[f"finished_{kind}"], bool),
                    kl=float(item["kl"]) if kind == "sampled" else None,
                    parts=_typed(item.get(f"parts_{kind}", {}), dict),
                    branches=_typed(item.get(f"branches_{kind}", 1), int),
                )
                for kind in ("greedy", "sampled")
            )
            responses[_typed(item["index"], int)] = PromptResponses(_typed(item["prompt"], str), greedy, sampled)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"evaluation {source}:{number}: damaged record ({type(error).__name__}: {error}); start a new run"
            ) from None
    return responses


def rescored(
    responses: Mapping[int, PromptResponses], weights: Mapping[str, float], optional: Collection[str]
) -> dict[int, PromptResponses]:
    """Return ``responses`` with the scores that the ``weights`` of an ensemble's parts give them, by name.

    ``optional`` parts without a score are left out. Raises ScorerFailed if another part with a weight has none.
    """

    def score(response: Response, index: int) -> Response:
        total = 0.0
        for name, weight in weights.items():
            if weight and (name in response.parts or name not in optional):
                if name not in response.parts:
                    raise ScorerFailed(
                        f"reward.parts.{name}: has no score of the initial policy's response to prompt {index + 1}, because it "
                        "failed before the first step; start a new run to compare with the initial policy"
                    )
                total += weight * response.parts[name]
        earned = response.parts.get(ENVIRONMENT_PART, 0.0)
        return replace(response, score=float(np.float32(total)) + earned)

    return {
        index: replace(each, greedy=score(each.greedy, index), sampled=score(each.sampled, index))
        for index, each in responses.items()
    }


T = TypeVar("T")


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"got {type(value).__name__}, expected {kind.__name__}")
    return value
