"""Training with TRL on a Quartet config, with the duration of each step.

python -m benchmarks.trl_training CONFIG STEPS OUT [--policy DIRECTORY] [--score-at-eos] [KEY=VALUE...] needs an environment
with TRL, which `make parity` creates. benchmarks.end_to_end and benchmarks.evidence run this module in it. The estimator gae
selects PPO, rloo selects RLOO. Training uses the actor's dtype, and all CPU cores or the actor's GPU. On the CPU, each forward
pass has a whole mini-batch, which is fastest for TRL. On a GPU, whose memory is too small for those logits, it has as many tokens
as Quartet's. OUT gets a JSON object per step, DIRECTORY the final policy.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trl_rewriting import rewritten
from benchmarks.trl_settings import ppo_settings, rloo_settings
from quartet.config.loading import load_config
from quartet.config.root import Config

SCORE_AT_EOS = {"sequence_lengths + 1": "sequence_lengths"}
"""The expression of PPOTrainer.train that puts score and value one position past EOS, and its replacement."""


class Clock:
    """Record the end time and the metrics of each step."""

    def __init__(self, out: Path) -> None:
        self._out, self._since = out, time.perf_counter()

    def step(self, responses: int, tokens: int, reward: float) -> None:
        """Record a step. ``tokens``: response tokens up to the first EOS. ``reward``: mean score."""
        now = time.perf_counter()
        line = {"seconds": now - self._since, "responses": responses, "response_tokens": tokens, "reward_mean": reward}
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._since = time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train. See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_training", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--policy", type=Path)
    parser.add_argument(
        "--score-at-eos", action="store_true", help="PPO: give the score to EOS, not to the position after it"
    )
    options = parser.parse_intermixed_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    config = load_config(options.config, options.settings)
    os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, config.services.actor.devices))}
    warnings.simplefilter("ignore")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        ppo = functools.partial(_ppo, score_at_eos=options.score_at_eos)
        train = ppo if config.algorithm.estimator == "gae" else _rloo
        policy, tokenizer = train(config, options.steps, folder, Clock(options.out))
        if options.policy is not None:
            policy.save_pretrained(options.policy)
            tokenizer.save_pretrained(options.policy)


def _rows(config: Config) -> int:
    """Return the sequences per forward pass, a divisor of the mini-batch."""
    rollout = config.rollout
    mini_batch = rollout.prompts_per_step * rollout.samples_per_prompt // config.algorithm.num_mini_batches
    if not config.services.actor.devices:
        return mini_batch
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return max(
        n
        for n in range(1, mini_batch + 1)
        if mini_batch % n == 0 and (n == 1 or n * longest <= config.actor.max_forward_tokens)
    )


def _model(kind: str, path: str | None, dtype: str) -> Any:
    import transformers

    from quartet.models.weights.loading import DTYPES

    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(path, dtype=DTYPES[dtype])


def _tokenizer(config: Config) -> Any:
    from quartet.models.weights.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.actor.model)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _texts(config: Config) -> list[str]:
    return [json.loads(line)["text"] for line in Path(config.data.prompts).read_text().splitlines()]


def _ppo(config: Config, steps: int, folder: str, clock: Clock, score_at_eos: bool) -> tuple[Any, Any]:
    """Train with PPO, and return the policy and its tokenizer."""
    import datasets
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class TimedTrainer(PPOTrainer):  # type: ignore[misc]
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            variables = sys._getframe(1).f_locals
            tokens = int((~variables["padding_mask"]).sum())
            clock.step(len(variables["responses"]), tokens, float(variables["scores"].mean()))

    batch, rows = config.rollout.prompts_per_step, _rows(config)
    settings = PPOConfig(
        **ppo_settings(config, folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=batch // rows,
        total_episodes=batch * steps,
        local_rollout_forward_batch_size=rows if config.services.actor.devices else batch,
    )
    tokenizer = _tokenizer(config)
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _texts(config)]
    trainer = TimedTrainer(
        args=settings,
        processing_class=tokenizer,
        model=_model("CausalLM", config.actor.model, config.actor.dtype),
        ref_model=_model("CausalLM", config.actor.model, config.actor.dtype),
        reward_model=_model("SequenceClassification", config.reward.model, config.reward.dtype),
        value_model=_model("SequenceClassification", config.critic.model or config.reward.model, config.critic.dtype),
        train_dataset=datasets.Dataset.from_dict({"input_ids": prompts}),
    )
    train = rewritten(PPOTrainer.train, SCORE_AT_EOS) if score_at_eos else PPOTrainer.train
    train(trainer)
    return trainer.policy_model, tokenizer


def _rloo(config: Config, steps: int, folder: str, clock: Clock) -> tuple[Any, Any]:
    """Train with RLOO, and return the policy and its tokenizer."""
    import datasets
    import transformers
    from trl import RLOOConfig, RLOOTrainer

    algorithm, rollout = config.algorithm, config.rollout
    responses = rollout.prompts_per_step * rollout.samples_per_prompt
    updates, rows = algorithm.num_epochs * algorithm.num_mini_batches, _rows(config)
    last_step: dict[str, float] = {}

    class TimedTrainer(RLOOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            generated = super()._generate_and_score_completions(inputs)
            last_step["tokens"] = int(generated["completion_mask"].sum())
            return generated

        def _calculate_rewards(self, *arguments: Any) -> Any:
            rewards = super()._calculate_rewards(*arguments)
            last_step["reward"] = float(rewards.mean())
            return rewards

    class StepTimer(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % updates == 0:
                clock.step(responses, int(last_step["tokens"]), last_step["reward"])

    settings = RLOOConfig(
        **rloo_settings(config, folder),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=responses // algorithm.num_mini_batches // rows,
        steps_per_generation=responses // rows,
        max_steps=updates * steps,
    )
    tokenizer = _tokenizer(config)
    trainer = TimedTrainer(
        args=settings,
        processing_class=tokenizer,
        model=_model("CausalLM", config.actor.model, config.actor.dtype),
        reward_funcs=_scorer(config, tokenizer),
        train_dataset=datasets.Dataset.from_dict({"prompt": _texts(config)}),
        callbacks=[StepTimer()],
    )
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model), tokenizer


def _scorer(config: Config, tokenizer: Any) -> Callable[..., list[float]]:
    """Return a reward function that scores the token ids in one padded batch. TRL itself drops EOS."""
    import torch

    model = _model("SequenceClassification", config.reward.model, config.reward.dtype).eval()
    model = model.to("cuda" if config.services.actor.devices else "cpu")
    model.config.pad_token_id = tokenizer.pad_token_id
    truncation = config.algorithm.truncation
    penalty = truncation.penalty if truncation.treatment == "penalty" else 0.0

    def score(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rows = [tokenizer(text)["input_ids"] + ids for text, ids in zip(prompts, completion_ids, strict=True)]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), tokenizer.pad_token_id, device=model.device)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens, device=model.device)
            mask[row, : len(tokens)] = 1
        with torch.inference_mode():
            hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            last = hidden[torch.arange(len(rows), device=model.device), mask.sum(1) - 1]
            scores = model.score(last).squeeze(-1).float().cpu()
        ended = torch.tensor([tokens[-1] == tokenizer.eos_token_id for tokens in completion_ids])
        result: list[float] = (scores - torch.where(ended, 0.0, penalty)).tolist()
        return result

    return score


if __name__ == "__main__":
    main()
