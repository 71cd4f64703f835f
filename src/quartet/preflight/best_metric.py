"""Check of the metric that decides which checkpoint is the best."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from quartet.config.rewards import ENVIRONMENT_PART
from quartet.config.root import Config
from quartet.errors import ConfigError
from quartet.telemetry.step_metrics import METRICS, definition_of


def check_best_metric(config: Config) -> None:
    """Check that checkpoint.best_metric is a metric that this config produces. Raises ConfigError."""
    metric = config.checkpoint.best_metric
    if metric is None:
        return
    if definition_of(metric) is None:
        similar = ", ".join(get_close_matches(metric, METRICS, n=3, cutoff=0.4)) or "reward_mean, eval_reward_sampled"
        raise ConfigError(
            f"checkpoint.best_metric {metric}: no metric has this name; expected one of docs/reference/metrics.md, such as "
            f"{similar}"
        )
    for pattern, reason in _missing_metrics(config):
        if re.fullmatch(pattern, metric):
            raise ConfigError(
                f"checkpoint.best_metric {metric}: the run does not have this metric, because {reason}; choose another one "
                "of docs/reference/metrics.md"
            )


def _missing_metrics(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a regular expression of metrics that the run does not have, and the reason."""
    algorithm, rollout = config.algorithm, config.rollout
    correction = algorithm.rollout_correction
    weights, truncates = correction.level != "none", correction.treatment == "truncate"
    # A reward service elsewhere may be an ensemble whose parts this config does not name.
    unknown_parts = config.reward.source == "service" or config.services.reward.address is not None
    estimator = f"algorithm.estimator is {algorithm.estimator}"
    for pattern, given, reason in (
        (
            r"reward_.*|score_mean|length_reward_correlation|advantage_std|eval_reward_.*|eval_win_rate_.*",
            config.has_scores,
            "reward.source is none, so there are no scores",
        ),
        (r".*_critic|value_.*|explained_variance", config.has_critic, f"{estimator}, without a critic"),
        ("baseline_reward_mean", config.num_greedy_baselines, f"{estimator}, without greedy responses"),
        ("reference_version", config.reference.sync_steps, "reference.sync_steps is null"),
        ("teacher_kl", algorithm.distillation, "algorithm.distillation is null"),
        ("entropy_coefficient", algorithm.trains_entropy, "algorithm.entropy_coefficient is 0"),
        (r"importance_weight_max|importance_(ess|.*_fraction)", weights, "algorithm.rollout_correction.level is none"),
        (
            "importance_truncated_fraction",
            truncates,
            f"algorithm.rollout_correction.treatment is {correction.treatment}",
        ),
        ("importance_masked_fraction", not truncates, "algorithm.rollout_correction.treatment is truncate"),
        ("rejected_fraction", correction.rejection, "algorithm.rollout_correction.rejection is empty"),
        (
            "off_policy_masked_fraction",
            correction.off_policy_mask,
            "algorithm.rollout_correction.off_policy_mask is null",
        ),
        (
            "off_policy_steps",
            rollout.max_off_policy_steps or rollout.in_flight_updates,
            "rollout.max_off_policy_steps is 0",
        ),
        ("in_flight_tokens", rollout.in_flight_updates, "rollout.in_flight_updates is false"),
        ("turns_mean|branches_mean|observation_tokens", config.has_environment, "rollout.max_turns is 0"),
        (
            "sampling_rounds|equal_groups|prompts_consumed|generated_reward_mean",
            rollout.dynamic_sampling,
            "rollout.dynamic_sampling is false",
        ),
        ("generators|weight_update_.*", config.has_generators, "the actor generates"),
        (
            "eval_(reward|tokens|win_rate)_(greedy|sampled)|eval_(kl|eos_rate|judge_win_rate)",
            config.data.has_validation,
            "data.validation is null",
        ),
        (_unknown_sets(config), False, "evaluation.sets has no such set or no such value of pass_at or maj_at"),
        ("eval_judge_win_rate", config.evaluation.judge, "evaluation.judge is null"),
        (_except("set", [each.name for each in config.data.sets], "reward_mean"), False, "data.sets has no such set"),
        (
            _except("reward", list(config.reward.part_weights), "weight|missing|cured_faults"),
            False,
            "reward.parts has no such part",
        ),
        (_except("reward", _means(config), "mean"), unknown_parts, "reward.parts has no such part"),
    ):
        if not given:
            yield pattern, reason


def _except(prefix: str, names: list[str], suffixes: str) -> str:
    """Return a regular expression of PREFIX_NAME_SUFFIX with any NAME but ``names``."""
    known = "|".join(map(re.escape, names))
    return rf"{prefix}_(?!({known})_({suffixes})$).+_({suffixes})" if names else rf"{prefix}_.+_({suffixes})"


def _unknown_sets(config: Config) -> str:
    """Return a regular expression of the metrics of evaluation sets that the run does not have."""
    sets = config.evaluation.sets
    scored = ("reward_mean",) if config.has_scores else ()
    known = [f"eval_{each.name}_{suffix}" for each in sets for suffix in ("tokens_mean", "eos_rate", *scored)]
    known += [name for each in sets for name in each.metrics]
    own = "|".join(map(re.escape, known))
    return rf"(?!({own})$)eval_.+_(reward_mean|tokens_mean|eos_rate|pass_at_\d+|maj_at_\d+)"


def _means(config: Config) -> list[str]:
    """Return the rewards whose mean is a metric: those of an ensemble, and that of an environment beside another source."""
    return [*config.reward.part_weights, *([ENVIRONMENT_PART] if config.has_environment and config.has_reward else [])]
