"""What is said of a metric, and the charts of the dashboard with the curves of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One metric of metrics.jsonl or evaluations.jsonl."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    name: str
    """Key in the file. NAME stands for a part of a reward ensemble, or for a set of prompts, K for a number of responses."""
    unit: str
    """Unit, or an empty string."""
    meaning: str
    healthy: str
    """Shape of the curve in a run that learns."""
    warning: str = ""
    """Shape of the curve when something is wrong, or an empty string."""
    chart: str = ""
    """Title of the chart that shows it, or an empty string."""
    label: str = ""
    """Name of its curve in the chart, and in tables for people. NAME and K stand for a part, as in the name."""
    needs: Literal["", "scores", "critic", "teacher", "stage"] = ""
    """Part of a run without which it has no such chart."""

    @property
    def title(self) -> str:
        """Label and unit."""
        return f"{self.label}, {self.unit}" if " per " in self.unit else self.label


CHART_CURVES: tuple[tuple[str, Literal["", "scores", "critic", "teacher", "stage"], dict[str, str]], ...] = (
    ("Reward", "scores", {"reward_mean": "reward"}),
    ("Reward parts", "scores", {"reward_NAME_mean": "NAME"}),
    ("Reward weights", "scores", {"reward_NAME_weight": "NAME"}),
    ("KL to the teacher", "teacher", {"teacher_kl": "reverse KL"}),
    ("KL to the reference", "", {"kl_mean": "KL"}),
    ("Response length", "", {"response_tokens_mean": "tokens per response"}),
    ("Entropy", "", {"entropy": "entropy"}),
    ("Policy loss", "", {"policy_loss": "policy loss"}),
    ("Value loss", "critic", {"value_loss": "value loss"}),
    (
        "Step time",
        "",
        {
            "seconds": "total",
            "generate_seconds": "generate",
            "score_seconds": "score",
            "update_seconds": "update",
            "weights_exposed_seconds": "weights",
        },
    ),
    ("Utilisation", "", {"mfu_actor": "actor", "mfu_generation": "generation"}),
    ("Utilisation", "critic", {"mfu_critic": "critic"}),
    (
        "Tokens per second and device",
        "",
        {"tokens_per_second_actor": "actor", "tokens_per_second_generation": "generation"},
    ),
    ("Tokens per second and device", "critic", {"tokens_per_second_critic": "critic"}),
    ("Devices busy", "", {"device_busy_actor": "actor", "device_busy_generator": "generators"}),
    ("Devices busy", "critic", {"device_busy_critic": "critic"}),
    ("Finished responses", "", {"eos_rate": "finished responses"}),
    ("Gradient norms", "", {"grad_norm_actor": "actor"}),
    ("Gradient norms", "critic", {"grad_norm_critic": "critic"}),
    ("Gradient norms", "stage", {"grad_norm": "model"}),
    ("Clipped", "", {"clip_fraction": "clip fraction"}),
    ("Clipped", "critic", {"value_clip_fraction": "clip fraction of values"}),
    ("Approximate KL", "", {"approx_kl": "old policy to new"}),
    (
        "Correction for the engine",
        "",
        {
            "importance_ess": "effective sample size",
            "importance_truncated_fraction": "truncated",
            "importance_masked_fraction": "masked",
            "rejected_fraction": "rejected",
            "off_policy_masked_fraction": "off-policy",
        },
    ),
    ("Explained variance", "critic", {"explained_variance": "explained variance"}),
    ("KL coefficient", "", {"kl_coefficient": "β"}),
    ("Learning rate", "", {"learning_rate_actor": "actor"}),
    ("Learning rate", "critic", {"learning_rate_critic": "critic"}),
    ("Learning rate", "stage", {"learning_rate": "model"}),
    ("Repetition", "", {"repetition": "repetition"}),
    ("Reward on validation prompts", "", {"eval_reward_greedy": "greedy", "eval_reward_sampled": "sampled"}),
    (
        "Win rate against the initial policy",
        "",
        {"eval_win_rate_greedy": "greedy", "eval_win_rate_sampled": "sampled", "eval_judge_win_rate": "judge"},
    ),
    ("Success on evaluation sets", "", {"eval_NAME_pass_at_K": "NAME pass@K", "eval_NAME_maj_at_K": "NAME maj@K"}),
    ("Reward on evaluation sets", "", {"eval_NAME_reward_mean": "NAME"}),
    ("KL of sampled responses", "", {"eval_kl": "sampled"}),
    ("Length of evaluated responses", "", {"eval_tokens_greedy": "greedy", "eval_tokens_sampled": "sampled"}),
    ("Loss", "stage", {"loss": "training", "validation_loss": "held-out rows"}),
    ("Accuracy of pairs", "stage", {"accuracy": "training", "validation_accuracy": "held-out rows"}),
    ("Margin of scores", "stage", {"margin": "training", "validation_margin": "held-out rows"}),
    ("Accuracy of tokens", "stage", {"token_accuracy": "training", "validation_token_accuracy": "held-out rows"}),
)
"""Charts in their order: title, part of a run that they need, and the labels of their curves by metric."""


def metric(name: str, unit: str, meaning: str, healthy: str, warning: str = "") -> MetricDefinition:
    """Return a definition with the chart that shows the metric."""
    found = ((chart, labels[name], needs) for chart, needs, labels in CHART_CURVES if name in labels)
    return MetricDefinition(name, unit, meaning, healthy, warning, *next(found, ()))
