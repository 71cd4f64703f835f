"""Conditions on the KL penalty and the entropy in the loss."""

from __future__ import annotations

from quartet.config.tree import ConfigTree


def check_penalties(config: ConfigTree) -> None:
    """Raise ValueError if the settings of the KL penalty or of the entropy contradict each other or the rest of the config."""
    algorithm = config.algorithm
    if algorithm.kl_estimator == "absolute" and not algorithm.has_kl_loss:
        _check_rounding(config)
    _check_kl_controller(config)
    _check_entropy_controller(config)


def _check_rounding(config: ConfigTree) -> None:
    """Refuse log-probs whose rounding errors differ between policy and reference: each error would count as KL."""
    setting, remedy = "algorithm.kl_estimator absolute", "set kl_estimator k1"
    rollout = config.rollout
    for key, dtype in (("actor.dtype", config.actor.dtype), ("reference.dtype", config.reference.dtype)):
        if dtype not in (None, "float32"):
            raise ValueError(
                f"{setting}: with {key} {dtype} the log-probs of policy and reference round differently once their weights "
                f"differ, and each rounding error counts as KL; {remedy}, or {key} float32"
            )
    if config.algorithm.kl_log_probs == "trainer":
        return
    for cause, differs in (
        (f"rollout.engine {rollout.engine}", rollout.engine != "torch"),
        ("rollout.merge_adapter", rollout.merge_adapter),
    ):
        if differs:
            raise ValueError(
                f"{setting}: with {cause} the log-probs of the engine round differently from those of the reference, and "
                f"each rounding error counts as KL; {remedy}, or kl_log_probs trainer"
            )


def _check_kl_controller(config: ConfigTree) -> None:
    controller, coefficient = config.algorithm.kl_controller, config.algorithm.kl_coefficient
    if controller.kind == "fixed":
        return
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    setting = f"algorithm.kl_controller.kind {controller.kind}"
    if coefficient == 0:
        raise ValueError(f"{setting}: it scales kl_coefficient, which is 0; set kl_coefficient above 0, or kind fixed")
    if controller.kind == "adaptive" and controller.horizon <= 0.2 * samples:
        raise ValueError(
            f"{setting}: horizon {controller.horizon:g}: expected more than {0.2 * samples:g}, a fifth of the responses "
            "of a step"
        )
    if controller.kind == "simple" and controller.horizon <= 1:
        raise ValueError(f"{setting}: horizon {controller.horizon:g}: expected more than 1 step")


def _check_entropy_controller(config: ConfigTree) -> None:
    controller, coefficient = config.algorithm.entropy_controller, config.algorithm.entropy_coefficient
    low, high = controller.min_coefficient, controller.max_coefficient
    if low > high:
        raise ValueError(
            f"algorithm.entropy_controller.min_coefficient {low:g}: expected at most max_coefficient {high:g}"
        )
    if controller.kind == "adaptive" and not low <= coefficient <= high:
        raise ValueError(
            f"algorithm.entropy_coefficient {coefficient:g}: expected {low:g} to {high:g}, the bounds of "
            "algorithm.entropy_controller"
        )
