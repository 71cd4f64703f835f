"""Conditions between the evaluations and other sections."""

from __future__ import annotations

from quartet.config.evaluation import VERIFIERS_WITH_ANSWERS
from quartet.config.tree import ConfigTree


def check_evaluation(config: ConfigTree) -> None:
    """Raise ValueError if there are no prompts to evaluate on, or if a set needs scores or answers that the run does not have."""
    evaluation = config.evaluation
    if evaluation.every_steps and not config.data.has_validation and not evaluation.sets:
        raise ValueError(
            f"evaluation.every_steps {evaluation.every_steps}: data.validation is null; set data.validation or evaluation.sets, "
            "or evaluation.every_steps 0"
        )
    for each in evaluation.sets:
        key = f"evaluation.sets.{each.name}"
        for name in ("pass_at", "maj_at"):
            if getattr(each, name) and not config.has_scores:
                raise ValueError(
                    f"{key}.{name}: reward.source is none, so no response is a success; set reward.source, or remove it"
                )
        if each.maj_at and each.answer_function(config.reward) is None:
            source = config.reward.function if config.reward.source == "function" else f"source {config.reward.source}"
            raise ValueError(
                f"{key}.maj_at: the reward ({source}) has no answers to vote on; set {key}.answer to a function that finds "
                f"the answer in a response, or reward.function to {' or '.join(VERIFIERS_WITH_ANSWERS)}"
            )
