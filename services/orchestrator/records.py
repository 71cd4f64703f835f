"""What a committed step leaves behind: its trajectories as text, and the services' figures under their public names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quartet.types import FinishReason, Role, UpdateResult
from services.orchestrator.collector import CollectedStep
from services.orchestrator.experience import PreparedStep

_METRICS = {
    Role.ACTOR: ("policy_loss", "clip_fraction", "approx_kl", "entropy", "rollout_mismatch_kl", "importance_weight"),
    Role.CRITIC: ("value_loss", "value_clip_fraction"),
}
_BOTH = ("grad_norm", "optimizer_steps", "skipped_steps")
"""Actor and critic report these alike, so the role is part of the public name."""


def update_metrics(updates: Mapping[Role, UpdateResult]) -> dict[str, float]:
    """The services' own figures under the names that they have everywhere; what a service did not see is left out."""
    found: dict[str, float] = {}
    for role, result in updates.items():
        names = {name: name for name in _METRICS[role]} | {name: f"{name}_{role}" for name in _BOTH}
        found |= {public: result.metrics[name] for name, public in names.items() if name in result.metrics}
    return found


def trajectory_lines(tokenizer: Any, collected: CollectedStep, prepared: PreparedStep) -> list[dict[str, Any]]:
    """One object for each response of a step, for ``trajectories/step-000001.jsonl``."""
    trajectories = [item.trajectory for item in collected.scored]
    prompts = tokenizer.batch_decode([t.prompt_ids for t in trajectories])
    responses = tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
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
