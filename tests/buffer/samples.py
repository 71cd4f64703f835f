"""Sample trajectories and experience for the buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quartet.contract.trajectory import (
    Branch,
    FinishReason,
    Segment,
    SegmentRole,
    TokenBatch,
    Trajectory,
    TrajectoryId,
)
from quartet.contract.update import Experience


def trajectory(
    run: str, prompt: int, step: int = 1, sample: int = 0, response: int = 3, version: int = 0
) -> Trajectory:
    """Return a trajectory with tokens and log-probs derived from the arguments."""
    return Trajectory.of_response(
        TrajectoryId(run, step, prompt, sample),
        version,
        np.array([prompt + 1, 2], np.int32),
        np.arange(response, dtype=np.int32) + prompt,
        -np.arange(response, dtype=np.float32) - prompt,
        FinishReason.LENGTH if prompt % 2 else FinishReason.EOS,
    )


def forked(run: str, prompt: int, response: int = 3, version: int = 0) -> Trajectory:
    """Return the same trajectory with a second branch, which begins with its prompt and has two tokens more."""
    item = trajectory(run, prompt, response=response, version=version)
    ids, log_probs = np.array([50 + prompt, 60], np.int32), np.array([-0.5, -0.25], np.float32)
    prompt_ids = np.array([*item.prompt_ids, 70], np.int32)
    segments = (Segment(SegmentRole.PROMPT, prompt_ids), Segment(SegmentRole.POLICY, ids, log_probs, version))
    return replace(item, further_branches=(Branch(segments, 0, len(item.prompt_ids)),))


def experience(run: str, step: int = 1) -> Experience:
    """Return experience of two sequences with three response tokens in total."""

    def flat(start: float) -> np.ndarray:
        return np.arange(3, dtype=np.float32) + np.float32(start)

    return Experience(
        run=run,
        step=step,
        policy_version=step - 1,
        ids=(f"{run}/{step}/0/0", f"{run}/{step}/1/0"),
        batch=TokenBatch(np.array([5, 6, 7, 5, 8], np.int32), np.array([1, 1], np.int32), np.array([2, 1], np.int32)),
        scores=np.array([0.5, -0.25], np.float32),
        log_probs=flat(-3),
        reference_log_probs=flat(-4),
        values=flat(1),
        advantages=flat(2),
        returns=flat(3),
        actor_mask=np.ones(3, np.float32),
    )
