"""Score a saved policy on fixed prompts: python -m benchmarks.evidence.scoring CONFIG POLICY OUT [KEY=VALUE...].

One sampled response to each prompt of data.validation, with the same random numbers for every policy. OUT gets a JSON object of
means: reward (raw score), score (less the penalty for a missing EOS), kl (to the initial policy, nats per response), eos_rate
and tokens.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from quartet.config.loading import load_config
from quartet.contract.generation import GenerationRequest
from quartet.contract.trajectory import FinishReason, TokenBatch, TrajectoryId
from quartet.data.evaluation import STEP, read_validation_prompts, run_sampling, stream_name
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.torch_settings import set_up_torch
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.rewards.factory import build_reward
from quartet.system.durable_files import write_durably


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the responses of a policy."""

    responses: int
    reward: float
    score: float
    kl: float
    eos_rate: float
    tokens: float


def main(path: str, policy: str, out: str, *settings: str) -> None:
    set_up_torch(1)
    write_durably(Path(out), json.dumps(asdict(score(Path(path), Path(policy), list(settings)))))


def score(path: Path, directory: Path, settings: list[str]) -> Scores:
    """Return the scores of the policy in ``directory``. Raises ConfigError, ModelError."""
    config = load_config(path, settings)
    rollout, device = config.rollout, "cpu"
    tokenizer = load_tokenizer(config.actor.model)
    policy = load_causal_lm(directory, config.actor.dtype, device)
    reference = load_causal_lm(config.actor.model, config.actor.dtype, device)
    vocabulary = int(policy.get_input_embeddings().weight.shape[0])
    prompts = read_validation_prompts(config, lambda: tokenizer, vocabulary).prompts
    engine = TorchEngine(policy, stop_token_ids(policy, tokenizer), rollout.max_concurrent_sequences)
    # A fixed run name and seed, because the random numbers depend on them.
    name = stream_name("evidence")
    requests = [GenerationRequest(TrajectoryId(name, STEP, prompt.index, 0), prompt.token_ids) for prompt in prompts]
    trajectories = engine.trajectories(requests, run_sampling(rollout), 0)
    batch = TokenBatch.of(trajectories)
    reward = build_reward(config, device)
    try:
        rewards = [
            float(value)
            for start in range(0, len(trajectories), 256)
            for value in reward.score(TokenBatch.of(trajectories[start : start + 256]), []).total
        ]
    finally:
        reward.close()
    references = response_log_probs(reference, batch, rollout.temperature, config.actor.max_forward_tokens)
    log_probs = np.concatenate([each.log_probs for each in trajectories])
    ended = [each.finish_reason is not FinishReason.LENGTH for each in trajectories]
    truncation = config.algorithm.truncation
    penalty = truncation.penalty if truncation.treatment == "penalty" else 0.0
    return Scores(
        responses=len(trajectories),
        reward=fmean(rewards),
        score=fmean(value - (0.0 if end else penalty) for value, end in zip(rewards, ended, strict=True)),
        kl=float((log_probs.astype(np.float64) - references).sum() / len(trajectories)),
        eos_rate=fmean(ended),
        tokens=float(batch.response_lengths.mean()),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
