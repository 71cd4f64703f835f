"""Artifacts of a committed step: trajectories as text, failed trajectories, and metrics under their public names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.config.prompt_sets import SET_FIELD
from quartet.contract.status import Role
from quartet.contract.trajectory import (
    FAILURES,
    Branch,
    FinishReason,
    Outcome,
    SegmentRole,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from quartet.contract.update import UpdateResult
from quartet.data.evaluation import stream_name
from quartet.services.orchestrator.algorithm.experience import PreparedStep, response_metrics
from quartet.services.orchestrator.rollout.collector import CollectedStep
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory

_METRICS = {
    Role.ACTOR: (
        "policy_loss",
        "clip_fraction",
        "approx_kl",
        "entropy",
        "rollout_mismatch_kl",
        "importance_weight",
        "importance_weight_max",
        "importance_ess",
        "importance_truncated_fraction",
        "importance_masked_fraction",
        "rejected_fraction",
        "off_policy_masked_fraction",
    ),
    Role.CRITIC: ("value_loss", "value_clip_fraction"),
}
_METRICS_OF_BOTH = ("grad_norm", "optimizer_steps", "skipped_steps")
"""Metrics that both actor and critic report. Their public name ends with the role."""

NO_SETS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Diagnostics of a step's responses: metrics by name, and a row for each response."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


def step_record(
    tokenizer: Any, collected: CollectedStep, prepared: PreparedStep, prompt_sets: Mapping[int, str] = NO_SETS
) -> StepRecord:
    """Return the record of a prepared step. ``prompt_sets``: see ``PendingStep``."""
    metrics = response_metrics([item.trajectory.policy_ids for item in collected.scored])
    metrics |= set_metrics(collected.scored, prompt_sets)
    return StepRecord(metrics, trajectory_rows(tokenizer, collected, prepared, prompt_sets))


def set_metrics(scored: Sequence[ScoredTrajectory], prompt_sets: Mapping[int, str]) -> dict[str, float]:
    """Return the mean score of each set of prompts that the step has prompts of."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for item in scored:
        if (name := prompt_sets.get(item.trajectory.id.prompt)) is not None and item.score is not None:
            scores[name].append(item.score)
    return {f"set_{name}_reward_mean": float(np.mean(values, dtype=np.float64)) for name, values in scores.items()}


def update_metrics(updates: Mapping[Role, UpdateResult]) -> dict[str, float]:
    """Return the services' metrics under their public names. A metric that a service does not report is left out."""
    metrics: dict[str, float] = {}
    for role, result in updates.items():
        names = {name: name for name in _METRICS[role]} | {name: f"{name}_{role}" for name in _METRICS_OF_BOTH}
        metrics |= {public: result.metrics[name] for name, public in names.items() if name in result.metrics}
    return metrics


def part_metrics(
    scored: Sequence[ScoredTrajectory], weights: Mapping[str, float], cured_faults: Mapping[str, int]
) -> dict[str, float]:
    """Return the weight of each part, the number of trained responses without a score of it, and its faults that were cured."""
    metrics: dict[str, float] = {}
    for name, weight in weights.items():
        metrics[f"reward_{name}_weight"] = weight
        metrics[f"reward_{name}_missing"] = sum(name not in item.parts for item in scored)
        metrics[f"reward_{name}_cured_faults"] = cured_faults.get(name, 0)
    return metrics


def trajectory_rows(
    tokenizer: Any, collected: CollectedStep, prepared: PreparedStep, prompt_sets: Mapping[int, str] = NO_SETS
) -> list[dict[str, Any]]:
    """Return one object per response of a step, for ``trajectories/step-000001.jsonl``."""
    prompts, responses = _texts(tokenizer, [item.trajectory for item in collected.scored])
    return [
        {
            "id": str(item.trajectory.id),
            "policy_version": item.trajectory.policy_version,
            **_origin(item.trajectory),
            **({SET_FIELD: prompt_sets[item.trajectory.id.prompt]} if prompt_sets else {}),
            "prompt": prompt,
            "response": response,
            "score": item.score,
            **({"parts": item.parts} if item.parts else {}),
            **({"logged": dict(item.logged)} if item.logged else {}),
            "kl": float(response_kl),
            "response_tokens": len(item.trajectory.policy_ids),
            "finished": item.trajectory.finish_reason is not FinishReason.LENGTH,
            **_episode(tokenizer, item.trajectory),
        }
        for item, prompt, response, response_kl in zip(
            collected.scored, prompts, responses, prepared.response_kl, strict=True
        )
    ]


def _origin(trajectory: Trajectory) -> dict[str, Any]:
    """Return the generator, its weights and their versions, as far as a trajectory has them."""
    spans = [
        {"policy_version": span.policy_version, "weights_digest": span.weights_digest.hex(), "tokens": span.tokens}
        for span in trajectory.version_spans
    ]
    return {
        **({"generator": trajectory.generator} if trajectory.generator else {}),
        **({"weights_digest": trajectory.weights_digest.hex()} if trajectory.weights_digest else {}),
        **({"version_spans": spans} if spans else {}),
    }


def _episode(tokenizer: Any, trajectory: Trajectory) -> dict[str, Any]:
    """Return the segments of an episode as text, with the reward after each turn; nothing for a single response."""
    if not (trajectory.turn_rewards or len(trajectory.turns) > 1):
        return {}
    rewards = iter(trajectory.turn_rewards)

    def segments_of(branch: Branch) -> list[dict[str, Any]]:
        segments = branch.segments[1:]
        texts = tokenizer.batch_decode([segment.token_ids for segment in segments])
        return [
            {
                "role": str(segment.role),
                "text": text,
                "tokens": len(segment.token_ids),
                **({"reward": next(rewards)} if trajectory.turn_rewards and segment.role is SegmentRole.POLICY else {}),
            }
            for segment, text in zip(segments, texts, strict=True)
        ]

    first, *further = (segments_of(branch) for branch in trajectory.branches)
    if not further:
        return {"segments": first}
    prompts = tokenizer.batch_decode([each.prompt_ids[each.shared_tokens :] for each in trajectory.further_branches])
    return {
        "segments": first,
        "further_branches": [
            {
                "parent": branch.parent,
                "shared_tokens": branch.shared_tokens,
                "prompt_tokens": len(branch.prompt_ids),
                "prompt": prompt,
                "segments": segments,
            }
            for branch, prompt, segments in zip(trajectory.further_branches, prompts, further, strict=True)
        ],
    }


def token_arrays(prepared: PreparedStep, has_critic: bool) -> dict[str, NDArray[Any]]:
    """Return a step's trajectories token by token, for ``tokens/step-000001.safetensors``, in the order of ``trajectory_rows``.

    A sequence is a branch. If any trajectory has more than one, ``branches`` int32 [trajectories] is their number.
    ``prompt_lengths`` and ``response_lengths`` int32 [sequences]; flat ``prompt_ids`` int32 [prompt tokens] and ``response_ids``
    int32 [response tokens]; ``log_probs`` of the engine, ``reference_log_probs``, ``kl`` (nats, as in ``PreparedStep``),
    ``advantages`` as trained on, ``returns`` and, with a critic, ``values``, all float32 [response tokens]. With observations
    also ``response_mask``, bool [response tokens]: True at the policy's own tokens. All other arrays are 0 at observation tokens.
    """
    experience, batch = prepared.experience, prepared.experience.batch
    parts = [(ids[:prompt], ids[prompt:]) for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)]
    arrays: dict[str, NDArray[Any]] = {
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "prompt_ids": np.concatenate([prompt for prompt, _ in parts]),
        "response_ids": np.concatenate([response for _, response in parts]),
        "log_probs": experience.log_probs,
        "reference_log_probs": experience.reference_log_probs,
        "kl": prepared.token_kl,
        "advantages": experience.advantages,
        "returns": experience.returns,
    }
    if len(experience.response_mask):
        arrays["response_mask"] = experience.response_mask
    if len(prepared.response_kl) < len(batch):
        arrays["branches"] = prepared.branches
    return arrays | ({"values": experience.values} if has_critic else {})


def in_flight_metrics(step: int, requested: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of the policy versions that generated the policy's tokens of ``step``.

    ``requested``: the policy version of the request. ``step`` - 1 is the newest.
    """
    tokens: Counter[int] = Counter()
    for trajectory in trajectories:
        length = len(trajectory.policy_ids)
        whole = VersionSpan(trajectory.policy_version, trajectory.weights_digest, length)
        for span in trajectory.version_spans or (whole,):
            tokens[span.policy_version] += span.tokens
    total = tokens.total()
    return {
        "off_policy_steps": sum((step - 1 - version) * count for version, count in tokens.items()) / total,
        "in_flight_tokens": sum(count for version, count in tokens.items() if version > requested) / total,
    }


def failed_trajectory_rows(
    tokenizer: Any, failed_trajectories: Sequence[FailedTrajectory], skipped_prompts: Collection[int] = ()
) -> list[dict[str, Any]]:
    """Return one object per failed trajectory, for ``failed_trajectories.jsonl``, with all that is needed to reproduce it.

    ``skipped_prompts``: indices of the prompts that the step has left out.
    """
    prompts, responses = _texts(tokenizer, [item.trajectory for item in failed_trajectories])
    return [
        {
            "step": item.trajectory.id.step,
            "id": str(item.trajectory.id),
            "policy_version": item.trajectory.policy_version,
            **_origin(item.trajectory),
            "prompt": prompt,
            "response": response,
            "prompt_ids": item.trajectory.prompt_ids.tolist(),
            "response_ids": item.trajectory.response_ids.tolist(),
            **_failed_episode(item.trajectory),
            "attempts": item.attempts,
            "outcome": str(item.outcome),
            "prompt_skipped": item.trajectory.id.prompt in skipped_prompts,
            "error": item.error,
        }
        for item, prompt, response in zip(failed_trajectories, prompts, responses, strict=True)
    ]


def left_out_rows(step: int, left_out: Sequence[TrajectoryId]) -> list[dict[str, Any]]:
    """Return one object per trajectory that the step did not need, for ``left_out.jsonl``.

    How far it came depends on time, so only its id is recorded.
    """
    return [{"step": step, "id": str(id)} for id in left_out]


def outcome_metrics(failed_trajectories: Sequence[FailedTrajectory]) -> dict[str, int]:
    """Return the number of failed trajectories of a step by outcome."""
    counts = Counter(item.outcome for item in failed_trajectories)
    return {f"outcome_{outcome}": counts[outcome] for outcome in FAILURES}


def _failed_episode(trajectory: Trajectory) -> dict[str, Any]:
    """Return the segments after the prompt of a failed episode, and what is needed to split ``response_ids`` into branches.

    For one that could not be scored only the latter, if it has several branches.
    """
    first, *further = (
        [{"role": str(part.role), "tokens": len(part.token_ids)} for part in branch.segments[1:]]
        for branch in trajectory.branches
    )
    branches = [
        {
            "parent": branch.parent,
            "shared_tokens": branch.shared_tokens,
            "prompt_ids": branch.prompt_ids.tolist(),
            "segments": segments,
        }
        for branch, segments in zip(trajectory.further_branches, further, strict=True)
    ]
    return {
        **({} if trajectory.outcome is Outcome.OK and not branches else {"segments": first}),
        **({"further_branches": branches} if branches else {}),
    }


def failed_evaluation_row(run: str, step: int, error: Exception) -> dict[str, Any]:
    """Return the row of ``failed_trajectories.jsonl`` for an evaluation that could not be scored or judged."""
    return {"step": step, "id": stream_name(run), "policy_version": step, "error": str(error)}


def failed_trajectories_note(step: int, collected: CollectedStep) -> str:
    """Return the note on a step with failed trajectories. See ``FailedTrajectory.cause`` for what it omits."""
    first, count = collected.failed_trajectories[0], len(collected.failed_trajectories)
    subject = "1 trajectory" if count == 1 else f"{count} trajectories"
    verb = "was" if count == 1 else "were"
    of_skipped = sum(item.trajectory.id.prompt in collected.skipped_prompts for item in collected.failed_trajectories)
    skipped = ", ".join(map(str, sorted(collected.skipped_prompts)))
    ways = ["new samples of the same prompts"] if count > of_skipped else []
    ways += [f"responses to the next prompts (skipped, by line from 0: {skipped})"] if skipped else []
    return (
        f"step {step}: {subject} could not be scored and {verb} replaced by {' or '.join(ways)}; "
        f"{first.trajectory.id} after {first.attempts} attempts: {first.cause}; see failed_trajectories.jsonl"
    )


def _texts(tokenizer: Any, trajectories: Sequence[Trajectory]) -> tuple[list[str], list[str]]:
    """Return prompts and responses as text."""
    if not trajectories:
        # Tokenizers decode an empty batch as an empty text.
        return [], []
    prompts = tokenizer.batch_decode([t.prompt_ids for t in trajectories])
    return prompts, tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
