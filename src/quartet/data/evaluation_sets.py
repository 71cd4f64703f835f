"""Evaluation sets: several samples of each prompt, with pass@k and maj@k. See ``quartet.config.evaluation``.

Like ``quartet.data.evaluation``, this module does not run models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from quartet.config.evaluation import AnswerFunction, EvaluationConfig, EvaluationSetConfig
from quartet.config.root import Config
from quartet.contract.trajectory import Prompt
from quartet.data.evaluation import Response, Worker, read_prompts
from quartet.data.prompt_encoding import PromptSet
from quartet.data.prompt_settings import NO_REVISIONS, PromptSettings
from quartet.data.repeated_samples import majority_at_k, pass_at_k
from quartet.errors import ComputationFailed, FunctionFailed
from quartet.system.user_function import FunctionWorker


def read_evaluation_sets(
    config: Config,
    load_tokenizer: Callable[[], Any],
    vocabulary_size: int,
    revisions: Mapping[str, str] = NO_REVISIONS,
) -> list[PromptSet]:
    """Return the usable prompts of each of ``evaluation.sets``, tokenized for the actor. See ``read_validation_prompts``."""
    sets = PromptSettings.for_evaluation_sets(config, revisions)
    return [read_prompts(settings, load_tokenizer, vocabulary_size) for settings in sets]


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt with all its responses, and the answers that were found in them; without ``maj_at`` no answers."""

    index: int
    prompt: str
    samples: Sequence[Response]
    answers: Sequence[str | None] = ()

    def successes(self, score: float) -> list[bool]:
        """Return of each response whether it is a success: its score is at least ``score``."""
        return [response.score is not None and response.score >= score for response in self.samples]


class AnswerFinder:
    """The function that finds the answers in the responses of a set, in a process of its own."""

    def __init__(self, settings: AnswerFunction, worker: Worker, timeout: float) -> None:
        """``timeout``: time limit for one call, in seconds."""
        self._settings, self._worker, self._timeout = settings, worker, timeout

    @classmethod
    def start(cls, each: EvaluationSetConfig, config: Config) -> AnswerFinder | None:
        """Start the process for a set, or return None if it needs no answers. Raises ConfigError."""
        settings = each.answer_function(config.reward) if each.maj_at else None
        if settings is None:
            return None
        evaluation: EvaluationConfig = config.evaluation
        worker = FunctionWorker(
            settings.function,
            settings.key,
            quotes=evaluation.quote_texts,
            quotes_key="evaluation.quote_texts",
        )
        return cls(settings, worker, evaluation.timeout_seconds)

    def answers(self, prompt: Prompt, text: str, responses: Sequence[str]) -> list[str | None]:
        """Return the answer in each response to a prompt, whose text is ``text``, or None. Raises FunctionFailed."""
        fields, about = json.loads(prompt.fields), f"prompt {prompt.index + 1}"
        found = []
        for response in responses:
            answer = self._worker.call([text, response, fields], self._timeout, about, self._settings.arguments)
            if answer is not None and not isinstance(answer, str):
                raise FunctionFailed(
                    f"{self._settings.key} {self._settings.function}, {about}: returned a {type(answer).__name__}, expected a "
                    "text, or None for a response without an answer"
                )
            found.append(answer)
        return found

    def close(self) -> None:
        """End the process. May be called again."""
        self._worker.close()


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A set of ``evaluation.sets`` with its prompts. ``answers`` finds the answers in responses, if any are needed."""

    settings: EvaluationSetConfig
    prompts: Sequence[Prompt]
    answers: AnswerFinder | None

    def group(self, texts: Sequence[str], responses: Sequence[Response]) -> list[SampledPrompt]:
        """Group ``responses``, which have the order of the prompts and of their samples. ``texts`` are those of the prompts.

        Raises FunctionFailed if the function that finds the answers fails.
        """
        finder, count = self.answers, self.settings.samples_per_prompt
        sampled = []
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
            samples = responses[number * count : (number + 1) * count]
            answers = finder.answers(prompt, text, [each.text for each in samples]) if finder else []
            sampled.append(SampledPrompt(prompt.index, text, samples, answers))
        return sampled


def summarize_set(settings: EvaluationSetConfig, prompts: Sequence[SampledPrompt]) -> dict[str, float]:
    """Return the metrics of a set by name. Scores are in units of reward, absent without scores, lengths in tokens.

    Raises ComputationFailed if a mean is not finite.
    """
    name = settings.name
    samples = [response for prompt in prompts for response in prompt.samples]
    scores = [response.score for response in samples if response.score is not None]
    means = {f"eval_{name}_reward_mean": fmean(scores)} if scores else {}
    means[f"eval_{name}_tokens_mean"] = fmean(response.tokens for response in samples)
    means[f"eval_{name}_eos_rate"] = fmean(response.finished for response in samples)
    successes = [prompt.successes(settings.success_score) for prompt in prompts]
    for k in settings.pass_at:
        means[f"eval_{name}_pass_at_{k}"] = fmean(pass_at_k(len(each), sum(each), k) for each in successes)
    for k in settings.maj_at:
        means[f"eval_{name}_maj_at_{k}"] = fmean(
            majority_at_k(prompt.answers, each, k) for prompt, each in zip(prompts, successes, strict=True)
        )
    for metric, value in means.items():
        if not math.isfinite(value):
            raise ComputationFailed(f"evaluation: {metric} is {value}; a score is not finite")
    return means


def set_row(settings: EvaluationSetConfig, prompt: SampledPrompt) -> dict[str, Any]:
    """Return the record of one prompt in ``evaluations/sets/NAME/step-000000.jsonl``."""
    return {
        "index": prompt.index,
        "prompt": prompt.prompt,
        "successes": sum(prompt.successes(settings.success_score)),
        "samples": [
            {
                "response": response.text,
                "score": response.score,
                "tokens": response.tokens,
                "finished": response.finished,
                **({"answer": prompt.answers[number]} if prompt.answers else {}),
                **({"parts": dict(response.parts)} if response.parts else {}),
                **({"branches": response.branches} if response.branches > 1 else {}),
            }
            for number, response in enumerate(prompt.samples)
        ],
    }
