"""Conditions between the evaluations and other sections."""

from __future__ import annotations

from quartet.config.evaluation import VERIFIERS_WITH_ANSWERS
from quartet.config.rules.sampling import settings_without_log_probs
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


def check_evaluation_generators(config: ConfigTree) -> None:
    """Raise ValueError if the generators of evaluation.generators cannot evaluate beside training."""
    count, rollout = config.evaluation.generators, config.rollout
    if not count:
        return
    setting = f"evaluation.generators {count}"
    if not config.evaluation.every_steps:
        raise ValueError(
            f"{setting}: evaluation.every_steps is 0, so there are no evaluations; set it above 0, or evaluation.generators 0"
        )
    if not config.services.generators and rollout.generators <= count:
        raise ValueError(
            f"{setting}: at least one other generator must be left for training, and rollout.generators is "
            f"{rollout.generators}; set rollout.generators to {count + 1} or more, or evaluation.generators 0"
        )
    if config.has_traffic:
        raise ValueError(
            f"{setting}: each generator of environment.kind traffic answers users, so none can be kept for evaluations; set "
            "evaluation.generators 0"
        )
    if not config.has_reference:
        raise ValueError(
            f"{setting}: with actor.lora the actor is the reference, and it cannot score evaluations during its updates; set "
            "reference.model to the model of the actor, or evaluation.generators 0"
        )
    for name, engine in (("vllm", rollout.vllm), ("tensorrt_llm", rollout.tensorrt_llm)):
        if engine is not None and getattr(engine, "release_memory", False):
            raise ValueError(
                f"{setting}: they generate while training uses the GPUs, so rollout.{name}.release_memory cannot free them in "
                "between; set release_memory false and give the generators GPUs of their own, or evaluation.generators 0"
            )
    if settings := settings_without_log_probs(rollout):
        raise ValueError(
            f"{setting}: the KL of an evaluation needs log-probs of the policy that sampled, and engine {rollout.engine} reports "
            f"none with {', '.join(settings)}; set {', '.join(settings.values())}, or evaluation.generators 0"
        )
