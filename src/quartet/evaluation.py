"""Evaluation: what a policy does on fixed prompts, greedily and sampled, against what the initial policy did there.

Nothing is computed with models here: responses and scores come from the services in a run, and from models in one process for
`quartet evaluate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, TypeVar

import numpy as np

from quartet.config import Config, RolloutConfig
from quartet.data import PromptEncoder, PromptSet, encode_prompts, iterate_prompt_lines
from quartet.errors import ComputationFailed, ConfigError
from quartet.types import FinishReason, FloatArray, IntArray, Prompt, SamplingParameters, Trajectory, TrajectoryId

STEP = 0
"""The step in the ids of an evaluation's trajectories: all evaluations draw the same random numbers, and none of training's."""


def read_validation_prompts(config: Config, tokenizer: Any, vocabulary_size: int) -> PromptSet:
    """The first ``evaluation.max_prompts`` usable prompts of ``data.validation``, by the actor's tokenizer. Raises ConfigError."""
    path = config.data.validation
    if path is None:
        raise ConfigError("data.validation: names no prompts to evaluate on; give a JSON Lines file of some")
    return encode_prompts(
        path,
        iterate_prompt_lines(path),
        PromptEncoder.of(tokenizer, config.actor.model),
        frozenset({tokenizer.eos_token_id} - {None}),
        vocabulary_size,
        config.data.max_prompt_tokens,
        limit=config.evaluation.max_prompts,
    )


def trajectory_id(run: str, prompt: Prompt) -> TrajectoryId:
    """The id of a response in an evaluation of ``run``."""
    return TrajectoryId(stream_name(run), STEP, prompt.index, 0)


def stream_name(run: str) -> str:
    """The run that an evaluation's trajectories are of. No run that trains is called so: a name has no colon."""
    return f"{run}:evaluation"


def greedy_sampling(rollout: RolloutConfig) -> SamplingParameters:
    """The most probable token at each place."""
    return SamplingParameters(rollout.max_response_tokens, temperature=0.0)


def run_sampling(rollout: RolloutConfig) -> SamplingParameters:
    """As the run draws its own responses."""
    return SamplingParameters(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k)


def texts_of(tokenizer: Any, token_ids: Sequence[IntArray], special_tokens: bool) -> list[str]:
    """The text of each, nothing tidied up. Prompts go with special tokens, which tell a chat's turns apart; responses without."""
    texts: list[str] = tokenizer.batch_decode(
        token_ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
    )
    return texts


@dataclass(frozen=True, slots=True)
class Response:
    """A response and what is known of it.

    ``score`` in units of reward; ``tokens`` its length; ``finished``: the model ended it; ``kl``: log π − log π_ref summed over
    its tokens, in nats, of a sampled one (of a greedy one it would estimate nothing).
    """

    text: str
    score: float
    tokens: int
    finished: bool
    kl: float | None = None

    @classmethod
    def of(
        cls, trajectory: Trajectory, text: str, score: float, reference_log_probs: FloatArray | None = None
    ) -> Response:
        """``reference_log_probs`` float32 [response tokens], for a sampled one."""
        kl = None
        if reference_log_probs is not None:
            kl = float(np.sum(trajectory.log_probs.astype(np.float64) - reference_log_probs.astype(np.float64)))
        finished = trajectory.finish_reason is FinishReason.EOS
        return cls(text, score, len(trajectory.response_ids), finished, kl)


@dataclass(frozen=True, slots=True)
class Answers:
    """A policy's two responses to one prompt: greedy, and drawn as the run draws."""

    prompt: str
    greedy: Response
    sampled: Response


@dataclass(frozen=True, slots=True)
class Comparison:
    """What policy and initial policy answer to one prompt, ``index`` in its file.

    ``judge`` in [0, 1]: 1 where a judge finds the policy's sampled response better; None without a judge.
    """

    index: int
    policy: Answers
    initial: Answers
    judge: float | None = None

    @property
    def win_greedy(self) -> float:
        """Whether the greedy response scores above the initial policy's."""
        return win(self.policy.greedy.score, self.initial.greedy.score)

    @property
    def win_sampled(self) -> float:
        """Whether the sampled response scores above the initial policy's."""
        return win(self.policy.sampled.score, self.initial.sampled.score)


class Worker(Protocol):
    """Calls one function of the user's, as ``quartet.rewards.function_worker.FunctionWorker`` does."""

    def call(self, arguments: Sequence[Any], timeout: float, about: str = "") -> Any:
        """Its result, a JSON value. Raises ComputationFailed when there is none within ``timeout`` seconds."""


class Judge:
    """The function of ``evaluation.judge``, f(prompt, response, initial_response, fields): which response is better."""

    def __init__(self, function: str, worker: Worker, timeout: float) -> None:
        """``timeout`` in seconds, of one call."""
        self._function, self._worker, self._timeout = function, worker, timeout

    def preference(self, number: int, prompt: str, response: str, initial_response: str, fields: str) -> float:
        """In [0, 1]: 1 where ``response`` is better. Two equal responses are a tie, and the function is not asked.

        ``number`` is the prompt's line, for messages; ``fields`` a JSON object. Raises ComputationFailed when the function
        fails, or gives something else.
        """
        if response == initial_response:
            return 0.5
        arguments = [prompt, response, initial_response, json.loads(fields)]
        answer = self._worker.call(arguments, self._timeout, f"prompt {number}")
        if isinstance(answer, bool) or not isinstance(answer, int | float) or not 0 <= answer <= 1:
            # Of a text not a word: it may be the prompt's.
            shown = repr(answer) if isinstance(answer, bool | int | float | None) else f"a {type(answer).__name__}"
            raise ComputationFailed(
                f"evaluation.judge {self._function}, prompt {number}: returned {shown}, "
                "expected a number from 0 to 1, 1 where the response is better than the initial one"
            )
        return float(answer)


def win(score: float, other: float) -> float:
    """1 where ``score`` is above ``other``, 0 where it is below; a tie counts half."""
    return 1.0 if score > other else 0.5 if score == other else 0.0


def compare(
    prompts: Sequence[Prompt],
    policy: Mapping[int, Answers],
    initial: Mapping[int, Answers],
    judge: Judge | None,
) -> list[Comparison]:
    """The policy's answers beside the initial policy's, prompt by prompt; both by the prompt's index.

    Raises ConfigError where the initial policy was asked something else; ComputationFailed where the judge fails.
    """
    comparisons = []
    for prompt in prompts:
        ours, theirs = policy[prompt.index], initial.get(prompt.index)
        if theirs is None or theirs.prompt != ours.prompt:
            raise ConfigError(
                f"data.validation: prompt {prompt.index + 1} is not the one that the initial policy answered before the "
                "first step; give the same file, data.max_prompt_tokens and evaluation.max_prompts as then"
            )
        preference = None
        if judge is not None:
            preference = judge.preference(
                prompt.index + 1, ours.prompt, ours.sampled.text, theirs.sampled.text, prompt.fields
            )
        comparisons.append(Comparison(prompt.index, ours, theirs, preference))
    return comparisons


def summarize(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Means over the prompts by metric name: scores in units of reward, KL in nats per response, lengths in tokens, shares.

    ``eval_eos_rate`` is of sampled responses, as ``eos_rate`` is. Raises ComputationFailed where one is not finite.
    """
    greedy = [item.policy.greedy for item in comparisons]
    sampled = [item.policy.sampled for item in comparisons]
    means = {
        "eval_reward_greedy": fmean(response.score for response in greedy),
        "eval_reward_sampled": fmean(response.score for response in sampled),
        "eval_kl": fmean(response.kl or 0.0 for response in sampled),
        "eval_tokens_greedy": fmean(response.tokens for response in greedy),
        "eval_tokens_sampled": fmean(response.tokens for response in sampled),
        "eval_eos_rate": fmean(response.finished for response in sampled),
        "eval_win_rate_greedy": fmean(item.win_greedy for item in comparisons),
        "eval_win_rate_sampled": fmean(item.win_sampled for item in comparisons),
    }
    judged = [item.judge for item in comparisons if item.judge is not None]
    if judged:
        means["eval_judge_win_rate"] = fmean(judged)
    for name, value in means.items():
        if not math.isfinite(value):
            raise ComputationFailed(f"evaluation: {name} is {value}; a score or log-prob is not finite")
    return means


def row(comparison: Comparison) -> dict[str, Any]:
    """What ``evaluations/step-000000.jsonl`` holds of one prompt."""
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
    }


def answers_of(rows: Sequence[Mapping[str, Any]], source: str) -> dict[int, Answers]:
    """The policy's answers of an evaluation's rows, by the prompt's index. Raises ConfigError naming the row that is damaged."""
    found = {}
    for number, item in enumerate(rows, 1):
        try:
            greedy, sampled = (
                Response(
                    text=_typed(item[kind], str),
                    score=float(item[f"score_{kind}"]),
                    tokens=_typed(item[f"tokens_{kind}"], int),
                    finished=_typed(item[f"finished_{kind}"], bool),
                    kl=float(item["kl"]) if kind == "sampled" else None,
                )
                for kind in ("greedy", "sampled")
            )
            found[_typed(item["index"], int)] = Answers(_typed(item["prompt"], str), greedy, sampled)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"evaluation {source}:{number}: not as an evaluation wrote it ({type(error).__name__}: {error}); "
                "start the run anew"
            ) from None
    return found


T = TypeVar("T")


def _typed(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"found {type(value).__name__}, expected {kind.__name__}")
    return value
