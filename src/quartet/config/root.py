"""The config of a run: the tree, after one validator has applied every rule."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import model_validator

from quartet.config.rules import evaluation, generation, sampling, services, training
from quartet.config.tree import ConfigTree

RULES: tuple[Callable[[ConfigTree], None], ...] = (
    training.check_sizes,
    training.check_estimator,
    training.check_warmup,
    sampling.check_penalties,
    generation.check_engine,
    generation.check_turns,
    generation.check_generators,
    generation.check_dynamic_sampling,
    generation.check_off_policy,
    generation.check_in_flight_updates,
    generation.check_router_replay,
    sampling.check_sampling,
    sampling.check_rollout_correction,
    training.check_reward_service,
    services.check_processes,
    services.check_environment,
    services.check_prompts,
    services.check_services,
    evaluation.check_evaluation,
    evaluation.check_evaluation_generators,
    services.check_reward_addresses,
    training.check_distillation,
    training.check_scores,
    training.check_best_checkpoint,
    training.check_average,
    training.check_synchronization,
)


class Contradictions(ValueError):
    """The problems of all rules that a config contradicts, one text for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Config(ConfigTree):
    """All settings of a run."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Config:
        self._resolve_truncation()
        problems = []
        for rule in RULES:
            try:
                rule(self)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise Contradictions(problems)
        return self

    def _resolve_truncation(self) -> None:
        """Replace a null algorithm.truncation.treatment, so that the run's config shows it. Defaults are shared: copy them."""
        if self.algorithm.truncation.treatment is None:
            algorithm, truncation = self.algorithm.model_copy(), self.algorithm.truncation.model_copy()
            truncation.__dict__["treatment"] = self.default_treatment
            algorithm.__dict__["truncation"] = truncation
            self.__dict__["algorithm"] = algorithm
