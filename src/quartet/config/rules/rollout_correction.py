"""Conditions on the correction for the difference between engine and trainer."""

from __future__ import annotations

from quartet.config.tree import ConfigTree


def check_rollout_correction(config: ConfigTree) -> None:
    """Raise ValueError if algorithm.rollout_correction, algorithm.old_log_probs and the rollout do not fit each other."""
    algorithm, rollout = config.algorithm, config.rollout
    correction = algorithm.rollout_correction
    uses_engine = algorithm.old_log_probs == "rollout"
    if uses_engine and correction.level != "none":
        raise ValueError(
            "algorithm.old_log_probs rollout: the ratio of the policy loss then compares with the engine, and importance weights "
            "would count the difference twice; set algorithm.rollout_correction.level none"
        )
    if uses_engine or correction.level != "none":
        return
    remedy = "set algorithm.rollout_correction.level, such as token, or algorithm.old_log_probs rollout with level none"
    if rollout.triton is not None and rollout.triton.weights == "static":
        raise ValueError(
            "rollout.triton.weights static: the server samples from another policy than the trained one, which needs "
            f"a correction; {remedy}"
        )
    if rollout.max_off_policy_steps and not correction.rejection:
        raise ValueError(
            f"rollout.max_off_policy_steps {rollout.max_off_policy_steps}: responses come from an older policy than the trained "
            f"one, which needs a correction; {remedy}"
        )
