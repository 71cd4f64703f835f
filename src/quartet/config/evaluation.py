"""Settings of evaluations: when, on which prompts, and with which metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, model_validator

from quartet.config.prompt_sets import PromptSetConfig
from quartet.config.rewards import RewardConfig
from quartet.config.section import Count, Finite, FunctionName, Positive, Section, WholeNumber

_ANSWERS = MappingProxyType(
    {
        "quartet.verifiers.math:final_answer": (
            "quartet.verifiers.math:given_answer",
            ("max_characters", "seconds", "decimals"),
        ),
        "quartet.verifiers.text:exact_match": ("quartet.verifiers.text:given_answer", ("ignore_case",)),
    }
)
"""By verifier: the function that returns the answer which it judges, and the arguments that both take."""
VERIFIERS_WITH_ANSWERS = tuple(_ANSWERS)


@dataclass(frozen=True, slots=True)
class AnswerFunction:
    """Function that finds the answer in a response, with arguments that every call gets. ``key``: the setting that names it."""

    key: str
    function: str
    arguments: Mapping[str, Any]


class EvaluationSetConfig(PromptSetConfig):
    """A set of evaluation prompts with several samples of each prompt. Its weight has no effect."""

    samples_per_prompt: Count = 1
    """Number of responses to each prompt, with the sampling settings of the run."""
    max_prompts: Count | None = None
    """Maximum number of prompts to use, from the start. Null: `evaluation.max_prompts`."""
    pass_at: tuple[Count, ...] = ()
    """Values of k, at most `samples_per_prompt`, of the metrics `eval_NAME_pass_at_K`: the probability that at least one of k
    responses to a prompt is a success."""
    maj_at: tuple[Count, ...] = ()
    """Values of k, at most `samples_per_prompt`, of the metrics `eval_NAME_maj_at_K`: the probability that the answer which most
    of k responses to a prompt give is a success."""
    success_score: Finite = 1.0
    """A response is a success if its score is at least this."""
    answer: FunctionName | None = None
    """Function, as package.module:callable, that finds the answer in a response, for `maj_at`: f(prompt, response, fields). It
    returns a text, or None for a response without an answer. Answers with the same text are equal. Null: that of
    `reward.function` if it is `quartet.verifiers.math:final_answer` or `quartet.verifiers.text:exact_match`."""

    @model_validator(mode="after")
    def _has_samples(self) -> EvaluationSetConfig:
        for name in ("pass_at", "maj_at"):
            values = getattr(self, name)
            if beyond := [k for k in values if k > self.samples_per_prompt]:
                raise ValueError(
                    f"{name}: {beyond[0]} is above samples_per_prompt {self.samples_per_prompt}; raise samples_per_prompt, or "
                    "remove it"
                )
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: expected each value once, got {list(values)}")
        if self.answer is not None and not self.maj_at:
            raise ValueError("answer: only used with maj_at; set maj_at, or remove it")
        return self

    def answer_function(self, reward: RewardConfig) -> AnswerFunction | None:
        """Return the function that finds the answers to vote on, or None if ``reward`` has none and the set names none."""
        if self.answer is not None:
            return AnswerFunction(f"evaluation.sets.{self.name}.answer", self.answer, {})
        if reward.source != "function" or (found := _ANSWERS.get(reward.function or "")) is None:
            return None
        function, shared = found
        given = {name: reward.arguments[name] for name in shared if name in reward.arguments}
        return AnswerFunction("reward.function", function, given)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of pass@k and maj@k."""
        return [f"eval_{self.name}_pass_at_{k}" for k in self.pass_at] + [
            f"eval_{self.name}_maj_at_{k}" for k in self.maj_at
        ]


class EvaluationConfig(Section):
    """Regular evaluation on the validation prompts: greedy and sampled responses, compared with those of the initial policy."""

    every_steps: WholeNumber = 0
    """Steps between evaluations, in addition to one before the first step and one after the last. 0 disables evaluation."""
    max_prompts: Count = 64
    """Maximum number of validation prompts to use, from the start of the file. The same for each of `sets` without its own
    number."""
    generators: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of the run's generators that only evaluate, beside the next step. It waits for the evaluation before it is
    committed, see `evaluation_wait_seconds`. The evaluation after the last step is by all generators. The result does not
    depend on this setting. 0: training stops during each evaluation."""
    sets: tuple[EvaluationSetConfig, ...] = ()
    """More sets of prompts. The metrics of a set are named after it, and a set can have several samples per prompt. The responses
    are not compared with those of the initial policy."""
    judge: FunctionName | None = None
    """Function, as package.module:callable, that compares two responses: f(prompt, response, initial_response, fields). It
    returns a number from 0 (worse) to 1 (better than the initial response). Null: no judge."""
    timeout_seconds: Positive = 60.0
    """Time limit for one call of the judge, in seconds."""
    quote_texts: bool = False
    """Include the text of exceptions of the judge in logs and notes, although it may quote prompts and responses. False: only
    type, file and line."""

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationConfig:
        names = [each.name for each in self.sets]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"sets: two sets have the name {repeated[0]}; rename one")
        return self
