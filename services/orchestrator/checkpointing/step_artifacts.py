"""What a committed step leaves behind: its trajectories as text, also those set aside, and figures under their public names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quartet.config import MAX_MICRO_BATCH_TOKENS
from quartet.evaluation import stream_name
from quartet.services.orchestrator.algorithm.experience import PreparedStep, response_metrics
from quartet.services.orchestrator.rollout.collector import CollectedStep
from quartet.services.orchestrator.rollout.scoring import FailedTrajectory
from quartet.types import Experience, FinishReason, Role, ServiceStatus, Trajectory, UpdateResult

_METRICS = {
    Role.ACTOR: ("policy_loss", "clip_fraction", "approx_kl", "entropy", "rollout_mismatch_kl", "importance_weight"),
    Role.CRITIC: ("value_loss", "value_clip_fraction"),
}
_BOTH = ("grad_norm", "optimizer_steps", "skipped_steps")
"""Actor and critic report these alike, so the role is part of the public name."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is written down of a step's responses and nobody learns from: figures by metric name, an object for each response."""

    figures: dict[str, float]
    lines: list[dict[str, Any]]


def step_record(tokenizer: Any, collected: CollectedStep, prepared: PreparedStep) -> StepRecord:
    """The record of a prepared step."""
    figures = response_metrics([item.trajectory.response_ids for item in collected.scored])
    return StepRecord(figures, trajectory_lines(tokenizer, collected, prepared))


def update_metrics(updates: Mapping[Role, UpdateResult]) -> dict[str, float]:
    """The services' own figures under the names that they have everywhere; what a service did not see is left out."""
    found: dict[str, float] = {}
    for role, result in updates.items():
        names = {name: name for name in _METRICS[role]} | {name: f"{name}_{role}" for name in _BOTH}
        found |= {public: result.metrics[name] for name, public in names.items() if name in result.metrics}
    return found


def memory_notes(status: ServiceStatus, tokens: int) -> list[str]:
    """What a user should know of a service whose updates have micro-batches of ``tokens``: nothing where memory is ample."""
    if not status.free_bytes:
        return []
    room = f"{status.token_bytes / 2**20:.2g} MiB a token, {status.free_bytes / 2**30:.2g} GiB free at its start"
    if tokens > status.micro_batch_tokens_held:
        return [
            f"{status.role}: the run's updates are of {tokens} tokens at a time, and its memory holds "
            f"{status.micro_batch_tokens_held} ({room}): it may run out; leave it more"
        ]
    again = ", with gradient checkpointing" if status.gradient_checkpointing else ""
    if again or tokens < MAX_MICRO_BATCH_TOKENS:
        return [f"{status.role}: updates of {tokens} tokens at a time{again} ({room})"]
    return []


def trajectory_lines(tokenizer: Any, collected: CollectedStep, prepared: PreparedStep) -> list[dict[str, Any]]:
    """One object for each response of a step, for ``trajectories/step-000001.jsonl``."""
    prompts, responses = _texts(tokenizer, [item.trajectory for item in collected.scored])
    return [
        {
            "id": str(item.trajectory.id),
            "policy_version": item.trajectory.policy_version,
            "prompt": prompt,
            "response": response,
            "score": item.score,
            **({"parts": item.parts} if item.parts else {}),
            "kl": float(response_kl),
            "response_tokens": len(item.trajectory.response_ids),
            "finished": item.trajectory.finish_reason is FinishReason.EOS,
        }
        for item, prompt, response, response_kl in zip(
            collected.scored, prompts, responses, prepared.response_kl, strict=True
        )
    ]


def token_arrays(experience: Experience, has_critic: bool) -> dict[str, NDArray[Any]]:
    """A step's trajectories token by token, for ``tokens/step-000001.safetensors``; in the order of ``trajectory_lines``.

    ``prompt_lengths`` and ``response_lengths`` int32 [sequences]; flat ``prompt_ids`` int32 [prompt tokens] and
    ``response_ids`` int32 [response tokens]; ``log_probs``, ``reference_log_probs``, ``kl`` (their difference, nats),
    ``advantages`` as trained on, ``returns`` and, with a critic, ``values``, all float32 [response tokens].
    """
    batch = experience.batch
    parts = [(ids[:prompt], ids[prompt:]) for ids, prompt in zip(batch.sequences(), batch.prompt_lengths, strict=True)]
    found: dict[str, NDArray[Any]] = {
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "prompt_ids": np.concatenate([prompt for prompt, _ in parts]),
        "response_ids": np.concatenate([response for _, response in parts]),
        "log_probs": experience.log_probs,
        "reference_log_probs": experience.reference_log_probs,
        "kl": experience.log_probs - experience.reference_log_probs,
        "advantages": experience.advantages,
        "returns": experience.returns,
    }
    return found | ({"values": experience.values} if has_critic else {})


def failed_trajectory_lines(tokenizer: Any, failed_trajectories: Sequence[FailedTrajectory]) -> list[dict[str, Any]]:
    """One object for each trajectory that could not be scored, for ``failed_trajectories.jsonl``: all that is needed to try it."""
    prompts, responses = _texts(tokenizer, [item.trajectory for item in failed_trajectories])
    return [
        {
            "step": item.trajectory.id.step,
            "id": str(item.trajectory.id),
            "policy_version": item.trajectory.policy_version,
            "prompt": prompt,
            "response": response,
            "prompt_ids": item.trajectory.prompt_ids.tolist(),
            "response_ids": item.trajectory.response_ids.tolist(),
            "attempts": item.attempts,
            "error": item.error,
        }
        for item, prompt, response in zip(failed_trajectories, prompts, responses, strict=True)
    ]


def failed_evaluation_lines(run: str, step: int, error: Exception) -> dict[str, Any]:
    """The line of ``failed_trajectories.jsonl`` of an evaluation that could not be scored or judged; the error names the responses."""
    return {"step": step, "id": stream_name(run), "policy_version": step, "error": str(error)}


def failed_trajectories_note(step: int, collected: CollectedStep) -> str:
    """What a user should know of a step in which trajectories were set aside; the errors' texts may quote responses."""
    first, count = collected.failed_trajectories[0], len(collected.failed_trajectories)
    them = "1 trajectory" if count == 1 else f"{count} trajectories"
    return (
        f"step {step}: {them} could not be scored, and others of the same prompts took the place; "
        f"{first.trajectory.id} after {first.attempts} attempts: {first.fault.__name__}; see failed_trajectories.jsonl"
    )


def _texts(tokenizer: Any, trajectories: Sequence[Trajectory]) -> tuple[list[str], list[str]]:
    """Prompts and responses."""
    if not trajectories:
        # Tokenizers take an empty batch for an empty text.
        return [], []
    prompts = tokenizer.batch_decode([t.prompt_ids for t in trajectories])
    return prompts, tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
