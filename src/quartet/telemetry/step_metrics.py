"""The metrics of a step: name, unit, chart, meaning, and how to read the curve.

The REST API serves this table, with that of evaluations, to the dashboard. docs/reference/metrics.md, the help of Prometheus, the
report and the command line read it. A test compares the names with those that the code writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from quartet.telemetry.evaluation_metrics import EVALUATION_METRICS
from quartet.telemetry.metric_definition import CHART_CURVES, MetricDefinition, metric

STEP_METRICS = (
    metric("step", "", "Number of the step, from 1.", "rises", "stands still"),
    metric(
        "reward_mean", "reward", "Mean score, as the reward source returns it.", "rises slowly", "rises fast, or never"
    ),
    metric(
        "reward_std",
        "reward",
        "Standard deviation of scores between responses.",
        "well above 0",
        "near 0: there is nothing to learn from",
    ),
    metric(
        "reward_NAME_mean",
        "reward",
        "Mean unweighted score of the ensemble part NAME.",
        "all parts rise together, or hold",
        "one part rises at the expense of the others",
    ),
    metric(
        "reward_NAME_weight",
        "",
        "Weight of the ensemble part NAME in this step. With 0 the part is a shadow: nothing is trained on its scores.",
        "steady, or changed by a user",
    ),
    metric(
        "reward_NAME_missing",
        "responses",
        "Responses of the step that the ensemble part NAME has not scored: a shadow that failed, or an optional part.",
        "0",
        "above 0: the shadow fails, see the log of the reward service",
    ),
    metric(
        "logged_NAME",
        "",
        "Mean of what the reward function logged as NAME: log_metric of TRL, a number beside the score of verl, or extra_logs of "
        "OpenRLHF. The first 64 names in alphabetical order.",
        "as the function defines it",
    ),
    metric(
        "set_NAME_reward_mean",
        "reward",
        "Mean score of the responses to prompts of the set NAME. Absent in steps without its prompts.",
        "all sets rise, or hold",
        "one set rises at the expense of the others",
    ),
    metric(
        "score_mean",
        "reward",
        "Mean score after normalisation, scale, clip and penalties.",
        "follows reward_mean",
        "falls below reward_mean: penalties outweigh the scores",
    ),
    metric(
        "kl_mean",
        "nats per response",
        "KL to the reference.",
        "rises, then settles",
        "rises without end, jumps, or stays at 0",
    ),
    metric(
        "reference_version",
        "step",
        "Step after which the reference was last synchronized with the policy, 0 before. Only with reference.sync_steps.",
        "rises by reference.sync_steps",
    ),
    metric(
        "teacher_kl",
        "nats per token",
        "Reverse KL to the teacher. Only with algorithm.distillation; kl_mean has it per response.",
        "falls, then settles above 0",
        "rises, or does not fall: raise actor.learning_rate",
    ),
    metric(
        "kl_coefficient",
        "per nat",
        "Weight β of the KL in the rewards or in the loss of this step.",
        "steady, or slowly moving",
        "grows or shrinks without end: the target is out of reach",
    ),
    metric(
        "entropy_coefficient",
        "loss per nat",
        "Weight of the entropy in the policy loss of this step. Only if it can be above 0.",
        "steady, or moves around a value",
        "stays at algorithm.entropy_controller.max_coefficient: the target is out of reach",
    ),
    metric(
        "entropy",
        "nats per token",
        "Entropy of the policy.",
        "falls slowly",
        "falls fast to near 0, or rises steadily",
    ),
    metric(
        "entropy_slope",
        "nats per token and step",
        "Change of entropy per step, over the window of the guards.",
        "near 0, slightly negative",
        "strongly negative for long",
    ),
    metric(
        "policy_loss",
        "",
        "Mean loss of the policy's optimizer steps.",
        "around 0 without trend; it does not measure progress",
        "spikes",
    ),
    metric(
        "approx_kl",
        "nats per token",
        "KL from the old to the new policy within a step.",
        "small and steady",
        "spikes",
    ),
    metric(
        "clip_fraction",
        "share of tokens",
        "Share of tokens that a clip, a mask or a selection of the policy loss affects. With cispo their weight is limited, with "
        "kl_cov they have a penalty, otherwise they have no gradient.",
        "small, above 0",
        "always 0, or a large share",
    ),
    metric("grad_norm_actor", "", "Mean gradient norm of the policy before clipping.", "steady", "spikes, growth"),
    metric(
        "grad_norm_critic", "", "Mean gradient norm of the value model before clipping.", "steady", "spikes, growth"
    ),
    metric(
        "learning_rate_actor",
        "per optimizer step",
        "Learning rate of the policy in this step. 0 during algorithm.value_pretraining_steps.",
        "as scheduled",
    ),
    metric(
        "learning_rate_critic", "per optimizer step", "Learning rate of the value model in this step.", "as scheduled"
    ),
    metric(
        "optimizer_steps_actor",
        "",
        "Optimizer steps taken by the policy.",
        "epochs times mini-batches",
        "fewer: algorithm.target_kl ended the update, or steps were skipped",
    ),
    metric(
        "optimizer_steps_critic",
        "",
        "Optimizer steps taken by the value model.",
        "epochs times mini-batches",
        "fewer: steps were skipped",
    ),
    metric(
        "skipped_steps_actor",
        "",
        "Optimizer steps of the policy skipped because of a NaN or infinity.",
        "0",
        "above 0",
    ),
    metric(
        "skipped_steps_critic",
        "",
        "Optimizer steps of the value model skipped because of a NaN or infinity.",
        "0",
        "above 0",
    ),
    metric(
        "rollout_mismatch_kl",
        "nats per token",
        "KL between the generation engine's log-probs and the trainer's. With algorithm.old_log_probs rollout and several "
        "mini-batches, the trainer's include the updates of the step.",
        "as small as rounding",
        "grows: the trained policy is not the sampled one",
    ),
    metric(
        "importance_weight",
        "",
        "Mean importance weight, which corrects for the mismatch, within its bounds, before normalize. 1 with "
        "algorithm.rollout_correction.level none.",
        "1",
        "away from 1",
    ),
    metric(
        "importance_weight_max",
        "",
        "Largest importance weight, before the bounds. Only with importance weights, as the next three.",
        "near 1; larger with rollout.max_off_policy_steps and at level sequence",
        "grows: single tokens or responses differ between engine and trainer",
    ),
    metric(
        "importance_ess",
        "share",
        "Effective sample size of the importance weights: a share of the tokens, or of the responses if each has one weight.",
        "near 1",
        "falls: few tokens or responses carry the update",
    ),
    metric(
        "importance_truncated_fraction",
        "share of tokens",
        "Share of tokens whose importance weight is moved to a bound. Only with treatment truncate.",
        "near 0",
        "rises: the bounds decide the weights",
    ),
    metric(
        "importance_masked_fraction",
        "share of tokens",
        "Share of tokens whose importance weight is 0. Only with treatment mask or seq_mask.",
        "near 0",
        "rises: the update loses its data",
    ),
    metric(
        "rejected_fraction",
        "share of tokens",
        "Share of tokens that algorithm.rollout_correction.rejection leaves out.",
        "near 0",
        "rises: the update loses its data",
    ),
    metric(
        "off_policy_masked_fraction",
        "share of tokens",
        "Share of tokens that off-policy sequence masking leaves out, over all epochs.",
        "near 0",
        "rises: the policy leaves the one that sampled, or engine and trainer differ",
    ),
    metric(
        "off_policy_steps",
        "updates",
        "Updates between the policy that generated the step and the newest one; the mean over tokens with "
        "rollout.in_flight_updates. Only with rollout.max_off_policy_steps.",
        "at most rollout.max_off_policy_steps; 0 after a checkpoint",
    ),
    metric(
        "in_flight_tokens",
        "share of tokens",
        "Share of response tokens by a newer policy than the requested one. Only with rollout.in_flight_updates.",
        "steady; larger with long responses",
        "0: updates arrive after the responses have ended, so in-flight updates have no effect",
    ),
    metric(
        "value_loss",
        "",
        "Mean loss of the value model's optimizer steps.",
        "falls, then fluctuates",
        "grows, or never falls",
    ),
    metric(
        "value_clip_fraction",
        "share of tokens",
        "Share of values whose gradient the value clip stopped.",
        "small",
        "most: the clip is narrow for the scale of the returns",
    ),
    metric(
        "explained_variance",
        "share",
        "Share of the returns' variance that the critic explains.",
        "between 0 and 1, rising at first",
        "below 0: worse than a constant",
    ),
    metric(
        "advantage_std",
        "reward",
        "Standard deviation of advantages before normalisation.",
        "steady",
        "near 0: responses score alike; growth: the critic lags behind",
    ),
    metric(
        "response_tokens_mean",
        "tokens",
        "Mean tokens per response, without those of observations.",
        "steady, or as the task requires",
        "rises with reward and KL, or falls to almost 0",
    ),
    metric(
        "length_reward_correlation",
        "",
        "Correlation of length and score within a step.",
        "moderate, steady",
        "near 1",
    ),
    metric(
        "eos_rate",
        "share of responses",
        "Share of responses that end before a limit of tokens or turns.",
        "near 1",
        "falls",
    ),
    metric(
        "repetition",
        "share of 3-grams",
        "Share of a response's 3-grams that repeat an earlier one.",
        "low, steady",
        "rises",
    ),
    metric("distinct_1", "share of tokens", "Share of distinct tokens in the step.", "steady", "falls"),
    metric(
        "distinct_2",
        "share of pairs",
        "Share of distinct token pairs in the step.",
        "steady",
        "falls: responses become alike",
    ),
    metric("prompt_tokens", "tokens", "Prompt tokens of the step.", "steady"),
    metric("response_tokens", "tokens", "Tokens that the policy generated for the step.", "steady"),
    metric(
        "turns_mean",
        "turns",
        "Mean turns per episode with an environment.",
        "as the task requires",
        "at rollout.max_turns: episodes do not end",
    ),
    metric(
        "branches_mean",
        "branches",
        "Mean token sequences per episode with an environment. More than 1: some did not continue with the tokens before.",
        "as the task requires",
    ),
    metric(
        "observation_tokens",
        "tokens",
        "Tokens of the environment's observations in the step. They are not trained on.",
        "steady",
    ),
    metric(
        "sampling_rounds",
        "rounds",
        "Rounds of generation. Only with rollout.dynamic_sampling, as equal_groups and generated_reward_mean.",
        "1 or 2",
        "near rollout.max_sampling_rounds: few prompts are of use",
    ),
    metric(
        "equal_groups",
        "prompts",
        "Prompts that were replaced because all their responses have the same score.",
        "falls at first, rises as the policy learns the prompts",
        "a multiple of rollout.prompts_per_step: prompts are too easy or too hard",
    ),
    metric(
        "prompts_consumed",
        "prompts",
        "Prompts that the step has taken from the order, used or not. Without rollout.dynamic_sampling, only in a step that "
        "skips prompts.",
        "a little over rollout.prompts_per_step",
        "a multiple of it",
    ),
    metric(
        "baseline_reward_mean",
        "reward",
        "Mean score of the greedy responses that estimator remax compares with.",
        "rises, above reward_mean",
        "below reward_mean: the greedy response is worse than a sampled one",
    ),
    metric(
        "generated_reward_mean",
        "reward",
        "Mean score of all responses that were generated, those to replaced prompts included.",
        "rises slowly; reward_mean, of the responses trained on, stays in the middle",
        "stands still",
    ),
    metric(
        "failed_trajectories",
        "trajectories",
        "Trajectories that could not be scored and were replaced; failed_trajectories.jsonl holds the errors.",
        "0",
        "above 0: the reward's failures select what is trained on",
    ),
    metric(
        "skipped_prompts",
        "prompts",
        "Prompts that the step has left out, because no response to them could be scored. The next prompts replaced them.",
        "0",
        "above 0: see failed_trajectories.jsonl for the prompts and the errors",
    ),
    *(
        metric(f"outcome_{name}", "trajectories", f"Failed trajectories {reason}", "0", "above 0")
        for name, reason in (
            ("timeout", "whose score or environment did not answer in time."),
            ("scorer_error", "for which the reward source failed or returned no finite number."),
            ("sandbox_error", "for which the sandbox of a verifier failed."),
            ("environment_error", "whose environment failed."),
            ("cancelled", "whose scoring or episode was cancelled."),
            ("refused", "that the reward source declined to score."),
        )
    ),
    metric(
        "outcome_left_out",
        "trajectories",
        "With rollout.extra_samples: trajectories that the step did not need, because others of their prompts used fewer tokens.",
        "prompts_per_step times extra_samples",
        "below that: trajectories failed, and others took their places",
    ),
    metric(
        "cured_faults",
        "faults",
        "Failed attempts to score that a further attempt cured: requests of all sources, and calls of the services.",
        "0",
        "above 0: a scorer or the network fails now and then; see the log of the reward service",
    ),
    metric(
        "reward_NAME_cured_faults",
        "faults",
        "Failed requests of the ensemble part NAME that a further attempt cured.",
        "0",
        "above 0: this scorer fails now and then",
    ),
    metric("seconds", "seconds", "Duration of the step.", "steady", "grows: longer responses, or a busy machine"),
    metric("generate_seconds", "seconds", "Duration of generation.", "steady", "grows"),
    metric("score_seconds", "seconds", "Duration of scoring after generation.", "steady", "grows"),
    metric("update_seconds", "seconds", "Duration of the updates.", "steady", "grows"),
    metric(
        "evaluation_wait_seconds",
        "seconds",
        "Time in which the step waited for the evaluation beside it. Only with evaluation.generators.",
        "0",
        "above 0: an evaluation takes longer than a step; raise evaluation.generators, or evaluate fewer prompts or samples",
    ),
    metric(
        "generators",
        "generators",
        "Generators that are ready at the end of the step.",
        "all of them",
        "falls: generators are lost or refused, the services page says why",
    ),
    metric(
        "weights_changed",
        "calls",
        "Generate calls at whose end the engine's weights were not those that it had loaded. Their trajectories were discarded.",
        "0",
        "above 0: the memory of a machine is faulty, or an engine changes weights, the log names tensors and generator",
    ),
    metric(
        "weight_update_bytes",
        "bytes",
        "Compressed bytes of the policy's weights that generators received for this step, in total.",
        "steady: differences to the version before",
        "jumps to the size of all weights: generators were restarted or have missed versions",
    ),
    metric(
        "weight_update_seconds",
        "seconds",
        "Longest duration of an update of a generator's weights: transfer, load and check.",
        "steady, small beside generate_seconds",
        "grows: the network or the disk of the generators is slow",
    ),
    metric(
        "weight_transfers_NAME",
        "transfers",
        "Transfers of the policy's weights to generators for this step, by the way NAME.",
        "one for each generator, by the fastest way that it has",
        "full or delta on the actor's machine: its memory is not shared, and the log of the generator says why",
    ),
    metric(
        "weights_exposed_seconds",
        "seconds",
        "Time in which the step waited for weights: the actor published or a generator loaded them, and no service trained, "
        "scored or saved.",
        "small beside seconds",
        "a large share of seconds: see the way of the transfers, and the timeline",
    ),
    *(
        metric(
            f"tokens_per_second_{name}",
            "tokens per second",
            f"{what} per second and device, while it does so. A prompt that several responses share counts once.",
            "steady",
            "falls: another process uses the device, or sequences became longer",
        )
        for name, what in (
            ("actor", "Tokens of the actor's updates, those of each epoch,"),
            ("critic", "Tokens of the critic's updates, those of each epoch,"),
            ("generation", "Tokens of the policy that are generated"),
        )
    ),
    *(
        metric(
            f"mfu_{name}",
            "",
            f"Model FLOP utilisation of {what}: FLOPs that the model needs, over the time and the devices that it takes, as a "
            "fraction of a large matmul on this device. Absent for a model or device whose FLOPs are not known.",
            healthy,
            "falls: see tokens_per_second and the timeline",
        )
        for name, what, healthy in (
            ("actor", "the actor's updates", "0.3 to 0.6 with enough tokens in a micro-batch"),
            ("critic", "the critic's updates", "0.3 to 0.6 with enough tokens in a micro-batch"),
            ("generation", "generation", "far below that of updates: decoding is limited by the memory bandwidth"),
        )
    ),
    *(
        metric(
            f"device_{name}_{role}",
            unit,
            f"{meaning} of the {role}{'s' * (role == 'generator')}, {of}. In a step shorter than a second: the last sample.",
            healthy,
            warning,
        )
        for name, unit, meaning, of, healthy, warning in (
            (
                "busy",
                "share",
                "How busy the devices",
                "over the samples of the step: the share of time in which a GPU ran kernels, or of the cores that a process used",
                "high while the service works, see the timeline",
                "low in a step that waits for this service: it waits for the CPU or the network",
            ),
            (
                "memory_bytes",
                "bytes",
                "Largest memory in use on the devices",
                "of all processes on a GPU, or of the process on a CPU",
                "steady",
                "rises towards the memory of the device",
            ),
            (
                "power_watts",
                "watts",
                "Mean power of the GPUs",
                "absent where NVML does not report it",
                "steady",
                "far below the limit: the GPU waits for memory, for the CPU or for another service",
            ),
        )
        for role in ("actor", "critic", "generator")
    ),
)
"""Metrics of metrics.jsonl. Those of critic, scores, episodes and generators in separate processes are absent without them."""

STAGE_METRICS = (
    *(
        metric(f"{prefix}{name}", unit, f"{meaning} {rows}", healthy, warning)
        for name, unit, meaning, healthy, warning in (
            ("loss", "", "Mean loss", "falls, then settles", "rises, or does not fall"),
            ("accuracy", "share of pairs", "Pairs whose chosen answer scores higher,", "rises from 0.5", "stays there"),
            ("margin", "reward", "Mean score of chosen less rejected answers", "rises, then settles", "stays at 0"),
            ("token_accuracy", "share of tokens", "Answer tokens that are the most probable ones,", "rises", "falls"),
        )
        for prefix, rows in (
            ("", "of the rows of the step."),
            ("validation_", "of the held-out rows. Only in steps with an evaluation."),
        )
    ),
    metric("grad_norm", "", "Gradient norm before clipping.", "steady", "spikes, growth"),
    metric("learning_rate", "per optimizer step", "Learning rate of the step.", "as scheduled"),
    metric("tokens", "tokens", "Tokens of the step, without padding.", "steady"),
)
"""Metrics of the stages before RLHF. They also write ``step``, ``seconds``, and ``entropy`` in supervised fine-tuning."""

METRICS = {definition.name: definition for definition in (*STEP_METRICS, *STAGE_METRICS, *EVALUATION_METRICS)}
"""All metrics by name."""
CHARTS = {
    title: [METRICS[name] for each, _, labels in CHART_CURVES if each == title for name in labels]
    for title, _, _ in CHART_CURVES
}
"""Metrics of each chart by its title, in their order."""


def definition_of(name: str) -> MetricDefinition | None:
    """Return the definition of a metric of a run, with the name of a part or set and K filled in. None if there is none."""
    if name in METRICS:
        return METRICS[name]
    for pattern, definition in METRICS.items():
        if "NAME" in pattern and (match := re.fullmatch(_pattern_of(pattern), name)):
            meaning, label = (_filled(text, match.groupdict()) for text in (definition.meaning, definition.label))
            return replace(definition, name=name, meaning=meaning, label=label)
    return None


def _pattern_of(name: str) -> str:
    """Return a regular expression of the names that the name of a definition stands for."""
    return re.sub(r"K$", r"(?P<K>\\d+)", name.replace("NAME", "(?P<NAME>.+)"))


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the values of NAME and K, where they are words of their own."""
    return re.sub(r"(?<![A-Z])(NAME|K)(?![A-Z])", lambda match: values.get(match[1], match[1]), text)
