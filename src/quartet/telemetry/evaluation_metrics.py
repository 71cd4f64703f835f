"""The metrics of an evaluation, see ``step_metrics``."""

from __future__ import annotations

from quartet.telemetry.metric_definition import metric

EVALUATION_METRICS = (
    *(
        metric(
            f"eval_reward_{kind}",
            "reward",
            f"Mean score of {kind} responses to the validation prompts.",
            "rises with reward_mean",
            "stays while reward_mean rises: the prompts are memorised",
        )
        for kind in ("greedy", "sampled")
    ),
    metric("eval_kl", "nats per response", "KL of the sampled responses.", "as kl_mean", "far above kl_mean"),
    metric("eval_tokens_greedy", "tokens", "Mean tokens per greedy response.", "steady", "rises with the reward"),
    metric("eval_tokens_sampled", "tokens", "Mean tokens per sampled response.", "steady", "rises with the reward"),
    metric(
        "eval_eos_rate",
        "share of responses",
        "Share of sampled responses that end before a limit of tokens or turns.",
        "near 1",
        "falls",
    ),
    *(
        metric(
            f"eval_win_rate_{kind}",
            "share of prompts",
            f"Share of prompts on which the {kind} response scores above the initial policy's. A tie counts half.",
            "rises from 0.5",
            "stays while the reward rises: a few prompts carry the mean",
        )
        for kind in ("greedy", "sampled")
    ),
    metric(
        "eval_judge_win_rate",
        "share of prompts",
        "Mean verdict of evaluation.judge against the initial policy.",
        "rises with the win rates",
        "diverges from them: the reward is being exploited",
    ),
    metric(
        "eval_NAME_pass_at_K",
        "share of prompts",
        "Probability that at least one of K responses to a prompt of the evaluation set NAME is a success.",
        "rises",
        "stays or falls for large K while it rises for K = 1: the policy loses solutions that it had",
    ),
    metric(
        "eval_NAME_maj_at_K",
        "share of prompts",
        "Probability that the answer which most of K responses to a prompt of the evaluation set NAME give is a success.",
        "above pass@1",
        "below pass@1: the policy agrees on wrong answers",
    ),
    metric(
        "eval_NAME_reward_mean",
        "reward",
        "Mean score of the responses to the prompts of the evaluation set NAME.",
        "rises with reward_mean",
        "stays while reward_mean rises: the policy learns nothing that this set needs",
    ),
    metric("eval_NAME_tokens_mean", "tokens", "Mean tokens per response to the evaluation set NAME.", "steady"),
    metric(
        "eval_NAME_eos_rate",
        "share of responses",
        "Share of responses to the evaluation set NAME that end before a limit of tokens or turns.",
        "near 1",
        "falls",
    ),
)
"""Metrics of evaluations.jsonl."""
