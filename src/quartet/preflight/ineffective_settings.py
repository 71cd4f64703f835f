"""Settings that have no effect in a config, and settings that are known to harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quartet.config.root import Config
from quartet.config.section import Section
from quartet.preflight.findings import Finding


def check_settings(config: Config) -> Iterator[Finding]:
    """Yield a warning for each group of given settings that have no effect, and for a combination that is known to harm.

    In a section where all keys are given, as in the config that a run writes, only values other than the default count.
    """
    for section, names, reason in _ineffective(config):
        if keys := _given(config, section, names):
            yield Finding("warning", ", ".join(keys), f"not used: {reason}")
    algorithm = config.algorithm
    if algorithm.divides_by_group_std and not algorithm.has_kl_loss and algorithm.kl_coefficient:
        yield Finding(
            "warning",
            "algorithm.kl_loss none",
            f"estimator {algorithm.estimator} divides the rewards of a prompt by their standard deviation, the KL included, so "
            "responses with equal scores are trained on the noise of their KL at full scale; leave kl_loss out, and the KL is a "
            "term of the loss",
        )


def _ineffective(config: Config) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield a section, its keys without effect (empty: all keys), and the reason."""
    algorithm = config.algorithm
    if not config.has_critic:
        reason = f"algorithm.estimator {algorithm.estimator} has no critic"
        yield "critic", (), reason
        names = ("gae_lambda", "value_lambda", "length_adaptive_alpha", "value_clip", "value_pretraining_steps")
        yield "algorithm", names, reason
        yield "services.critic", (), reason
        yield "guards.critic_lost", (), reason
    if config.has_critic and algorithm.length_adaptive_alpha is not None and algorithm.value_lambda is not None:
        yield "algorithm", ("gae_lambda",), "algorithm.length_adaptive_alpha and value_lambda replace it"
    if not config.has_reference:
        reason = "the actor serves the reference, with its adapter disabled"
        yield "reference", (), reason
        yield "services.reference", (), reason
    elif config.reference.sync_steps is not None and not algorithm.kl_coefficient:
        yield (
            "reference",
            ("sync_steps",),
            "algorithm.kl_coefficient is 0, so only metrics depend on it",
        )
    elif config.reference.sync_steps is None:
        yield "reference", ("sync_alpha",), "reference.sync_steps is null, so the reference is frozen"
    if not config.has_reward:
        reason = "reward.source is none"
        yield "services.reward", (), reason
        yield "reward", ("tokenizer",), reason
    if not config.has_scores:
        reason = "reward.source is none, so there are no scores"
        yield "guards.reward_hacking", (), reason
        yield "guards.length_reward", (), reason
        yield "algorithm", ("normalize_advantages", "whiten_rewards", "gamma"), reason
    if algorithm.distillation is not None:
        yield "guards.kl_runaway", (), "the KL to a teacher starts high and falls"
        yield "algorithm", ("kl_estimator",), "algorithm.distillation replaces the KL penalty"
    elif not algorithm.kl_coefficient:
        yield (
            "algorithm",
            ("kl_estimator", "kl_log_probs"),
            "algorithm.kl_coefficient is 0, so only the metric kl_mean depends on it",
        )
    elif algorithm.has_kl_loss:
        yield "algorithm", ("kl_estimator",), f"the KL is a term of the loss, by algorithm.kl_loss {algorithm.kl_loss}"
    if not algorithm.kl_coefficient and algorithm.kl_loss not in ("none", algorithm.default_kl_loss):
        yield "algorithm", ("kl_loss",), "algorithm.kl_coefficient, its weight, is 0"
    if not algorithm.length_penalty.per_token:
        yield "algorithm.length_penalty", ("free_tokens",), "algorithm.length_penalty.per_token is 0"
    if not algorithm.overlong_penalty.buffer_tokens:
        yield "algorithm.overlong_penalty", ("penalty",), "algorithm.overlong_penalty.buffer_tokens is 0"
    if not config.rollout.dynamic_sampling:
        yield "rollout", ("max_sampling_rounds",), "rollout.dynamic_sampling is off"
    if algorithm.num_epochs == algorithm.num_mini_batches == 1 and algorithm.old_log_probs == "trainer":
        yield (
            "algorithm",
            ("clip_ratio", "clip_ratio_high", "dual_clip", "target_kl"),
            "with one epoch, one mini-batch and old_log_probs trainer, every ratio of the update is 1",
        )
    if algorithm.policy_loss == "dppo_tv":
        sides = zip(("clip_ratio", "clip_ratio_high"), algorithm.clip_range, strict=True)
        if limits := tuple(name for name, limit in sides if limit >= 1):
            yield "algorithm", limits, "two probabilities differ by at most 1, so this limit never masks a token"
    if not config.has_environment:
        reason = "rollout.max_turns is 0, so no environment is used"
        yield "environment", (), reason
        yield "services.environment", (), reason
    elif config.has_agents:
        limits = ("timeout_seconds", "max_sessions", "session_idle_seconds")
        yield "environment", limits, "environment.kind is agent; see environment.agent"
    elif config.has_traffic:
        limits = ("timeout_seconds", "num_workers", "max_sessions", "session_idle_seconds", "quote_texts")
        yield "environment", limits, "environment.kind is traffic; see environment.traffic"
        limits = ("pass_variables", "timeout_seconds", "max_concurrent")
        yield "environment.agent", limits, "environment.kind is traffic, so no agent runs"
    if not config.has_generators:
        reason = "the actor generates; set rollout.generators or services.generators for generators"
        yield "services.generator", (), reason
    elif not config.rollout.generators:
        yield "services.generator", ("python",), "rollout.generators is 0, so no generator is started on this machine"
    if algorithm.kl_controller.kind == "fixed":
        yield "algorithm.kl_controller", ("target", "horizon"), "algorithm.kl_controller.kind is fixed"
    if algorithm.entropy_controller.kind == "fixed":
        unused = ("target", "step_size", "min_coefficient", "max_coefficient")
        yield "algorithm.entropy_controller", unused, "algorithm.entropy_controller.kind is fixed"
    treatment = algorithm.truncation.treatment
    for name in ("penalty", "scale"):
        if treatment != name:
            yield "algorithm.truncation", (name,), f"algorithm.truncation.treatment is {treatment}"
    if config.checkpoint.best_metric is None:
        yield "checkpoint", ("best_mode",), "checkpoint.best_metric is null"
    for name, trained in (("actor", config.actor), ("critic", config.critic)):
        if trained.schedule == "constant" and (name == "actor" or config.has_critic):
            yield name, ("final_learning_rate",), f"{name}.schedule is constant"
        if trained.gradient_checkpointing:
            yield (
                name,
                ("compile",),
                f"{name}.gradient_checkpointing is true, and torch does not compile recomputed layers",
            )
    if not config.has_generators:
        reason = "the actor generates, and its engine has the weights"
        yield "rollout", ("share_weights", "share_directory", "share_gpu_memory", "process_group"), reason
    elif not config.rollout.share_weights:
        yield "rollout", ("share_directory", "share_gpu_memory"), "rollout.share_weights is false"
    elif config.rollout.engine != "torch":
        yield "rollout", ("share_gpu_memory",), f"engine {config.rollout.engine} reads weights from the host"
    elif config.services.actor.address is None and len(config.services.actor.devices) != 1:
        yield "rollout", ("share_gpu_memory",), "services.actor.devices does not name one GPU"
    elif config.rollout.generators and not config.services.generator.devices:
        yield "rollout", ("share_gpu_memory",), "services.generator.devices is empty, so generators use the CPU"


def _given(config: Config, path: str, names: tuple[str, ...]) -> list[str]:
    """Return the given keys of the section at ``path``, limited to ``names`` unless that is empty."""
    section: Any = config
    for name in path.split("."):
        section = getattr(section, name)
    return [key for key in _given_keys(section, path) if not names or key.removeprefix(f"{path}.") in names]


def _given_keys(section: Section, path: str) -> Iterator[str]:
    fields = type(section).model_fields
    written = section.model_fields_set == fields.keys()
    for name, field in fields.items():
        value, default = getattr(section, name), field.get_default(call_default_factory=True)
        if name not in section.model_fields_set or (written and value == default):
            continue
        if isinstance(value, Section) and isinstance(default, Section):
            yield from _given_keys(value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"
