"""`quartet evaluate`: compare a saved policy with the initial policy, in this process, with the metrics of evaluations in a
run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from quartet.cli.console import make_console
from quartet.config.loading import load_config
from quartet.config.root import Config
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Prompt, TokenBatch, Trajectory
from quartet.data.evaluation import (
    Comparison,
    Judge,
    PromptResponses,
    Response,
    compare,
    greedy_sampling,
    read_validation_prompts,
    row,
    run_sampling,
    summarize,
    texts_of,
    trajectory_id,
)
from quartet.engines.stop_strings import token_decoder
from quartet.errors import ConfigError, InvalidRequest, MismatchError, ModelError
from quartet.model_files.hub_models import looks_local
from quartet.models.forward.scoring import response_log_probs
from quartet.models.generation.torch_engine import TorchEngine
from quartet.models.weights.loading import load_causal_lm, stop_token_ids
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.preflight.models import check_same_tokenizer
from quartet.rewards.factory import build_reward
from quartet.rewards.reward_source import RewardSource
from quartet.run_directory.locking_and_removal import find_run
from quartet.run_directory.selection import policy_in
from quartet.system.user_function import FunctionWorker

SHOWN_PROMPTS = 3
"""Number of prompts whose responses are printed side by side."""


def evaluate(
    checkpoint: str, config_path: Path | None, overrides: list[str], device: str, as_json: bool, output: Path | None
) -> None:
    """Evaluate, print the means, and write one object per prompt to ``output``. Raises ConfigError for invalid input."""
    console = make_console(stderr=as_json)
    if looks_local(checkpoint) and not Path(checkpoint).is_dir():
        raise ModelError(f"evaluate {checkpoint}: no such directory; expected a saved policy, such as runs/NAME/policy")
    checkpoint = policy_in(checkpoint)
    config = load_config(config_path or _config_of_run(checkpoint), overrides)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: its directory does not exist; create it, or choose another file")
    with console.status("evaluating"):
        try:
            comparisons, notes = compare_with_initial(checkpoint, config, device)
        except InvalidRequest as error:
            raise ConfigError(f"evaluate {checkpoint}: {error}") from None
    for note in notes:
        console.print(note, soft_wrap=True)
    if output is not None:
        lines = (json.dumps(row(comparison), ensure_ascii=False) + "\n" for comparison in comparisons)
        output.write_text("".join(lines), encoding="utf-8")
    if as_json:
        print(json.dumps(summarize(comparisons)))
    else:
        console.print(_summary_table(comparisons), _responses_table(comparisons))


def _config_of_run(checkpoint: str) -> Path:
    run = find_run(Path(checkpoint))
    if run is None:
        raise ConfigError(f"evaluate {checkpoint}: is not in the directory of a run; give the config with --config")
    return run.config


def compare_with_initial(checkpoint: str, config: Config, device: str) -> tuple[list[Comparison], list[str]]:
    """Compare the responses of a saved policy and the initial policy to the validation prompts; also return notes for the user.

    Random numbers, batches and precision are the same as in evaluations of a run. With LoRA the last bits differ: a saved
    policy has its adapter merged into the weights, but a run keeps the two separate. Raises ConfigError, InvalidRequest,
    ComputationFailed.
    """
    if config.rollout.max_turns:
        raise ConfigError(
            f"evaluate {checkpoint}: rollout.max_turns {config.rollout.max_turns}: this command has no environment; read the "
            "evaluations of the run, or set rollout.max_turns=0 to evaluate the first turn"
        )
    tokenizer = load_tokenizer(config.actor.model)
    if tokenizer_fingerprint(load_tokenizer(checkpoint)) != tokenizer_fingerprint(tokenizer):
        raise MismatchError(
            f"evaluate {checkpoint}: its vocabulary differs from that of actor.model {config.actor.model}; "
            "expected a policy that was trained from it, or --config with the config of its run"
        )
    for key, model in config.models.items():
        if key.startswith("reward."):
            check_same_tokenizer(key, model, config.actor.model)
    with ExitStack() as stack:
        judge = None
        if config.evaluation.judge is not None:
            worker = FunctionWorker(config.evaluation.judge, "evaluation.judge", quotes=config.evaluation.quote_texts)
            stack.callback(worker.close)
            judge = Judge(config.evaluation.judge, worker, config.evaluation.timeout_seconds)
        policy = load_causal_lm(checkpoint, config.actor.dtype, device)
        vocabulary = int(policy.get_input_embeddings().weight.shape[0])
        prompt_set = read_validation_prompts(config, lambda: load_tokenizer(config.actor.model), vocabulary)
        reward = build_reward(config, device) if config.has_reward else None
        if reward is not None:
            stack.callback(reward.close)
        evaluator = _LocalEvaluator(config, tokenizer, prompt_set.prompts, reward, device)
        responses = evaluator.responses(policy)
        del policy  # Free its memory before the initial policy generates.
        initial = evaluator.responses(evaluator.initial_policy())
        return compare(prompt_set.prompts, responses, initial, judge), prompt_set.notes


class _LocalEvaluator:
    """Evaluator that generates responses with a policy and scores them with reward and reference, as the services do."""

    def __init__(
        self, config: Config, tokenizer: Any, prompts: Sequence[Prompt], reward: RewardSource | None, device: str
    ) -> None:
        self._config, self._tokenizer, self._prompts, self._reward = config, tokenizer, prompts, reward
        self._fields = {prompt.index: prompt.fields for prompt in prompts} if config.reward.needs_fields else {}
        self._device = device
        # Without a reference service, the actor computes reference log-probs with its adapter disabled and its own settings.
        chosen = config.reference if config.has_reference else config.actor
        self._reference_tokens = (
            config.reference.micro_batch_tokens if config.has_reference else config.actor.max_forward_tokens
        )
        self._reference_source = (config.reference_model, chosen.dtype or config.actor.dtype)
        self._reference = load_causal_lm(*self._reference_source, device)

    def initial_policy(self) -> Any:
        """Return the policy that the run starts from. It is the reference, unless the config names another."""
        initial = (self._config.actor.model, self._config.actor.dtype)
        return self._reference if initial == self._reference_source else load_causal_lm(*initial, self._device)

    def responses(self, policy: Any) -> dict[int, PromptResponses]:
        """Return the responses of the policy, by prompt index."""
        rollout = self._config.rollout
        stop_ids, decode = stop_token_ids(policy, self._tokenizer), token_decoder(self._tokenizer)
        engine = TorchEngine(policy, stop_ids, rollout.max_concurrent_sequences, decode=decode)
        greedy = self._generate(engine, greedy_sampling(rollout))
        sampled = self._generate(engine, run_sampling(rollout))
        texts = texts_of(self._tokenizer, [prompt.token_ids for prompt in self._prompts], special_tokens=True)
        return {
            prompt.index: PromptResponses(text, greedy[prompt.index], sampled[prompt.index])
            for prompt, text in zip(self._prompts, texts, strict=True)
        }

    def _generate(self, engine: TorchEngine, sampling: SamplingParameters) -> dict[int, Response]:
        run, size = self._config.run, self._config.rollout.score_batch_size
        requests = [GenerationRequest(trajectory_id(run.name, prompt), prompt.token_ids) for prompt in self._prompts]
        # Same order and batch size as in a run, for bit-identical scores.
        finished = engine.trajectories(requests, sampling, run.seed)
        responses: dict[int, Response] = {}
        for start in range(0, len(finished), size):
            responses |= self._scored(finished[start : start + size], sampled=sampling.temperature > 0)
        return responses

    def _scored(self, trajectories: list[Trajectory], sampled: bool) -> dict[int, Response]:
        batch = TokenBatch.of(trajectories)
        fields = [self._fields[trajectory.id.prompt] for trajectory in trajectories] if self._fields else []
        scores: list[float | None] = [None] * len(trajectories)
        if self._reward is not None:
            scores = self._reward.score(batch, fields).total.tolist()
        references: list[Any] = [None] * len(trajectories)
        if sampled:
            flat = response_log_probs(self._reference, batch, self._config.rollout.temperature, self._reference_tokens)
            references = np.split(flat, np.cumsum(batch.response_lengths)[:-1])
        texts = texts_of(self._tokenizer, [item.response_ids for item in trajectories], special_tokens=False)
        return {
            item.id.prompt: Response.of(item, text, score, reference)
            for item, text, score, reference in zip(trajectories, texts, scores, references, strict=True)
        }


def _summary_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of the means of policy and initial policy."""
    policy = summarize(comparisons)
    initial = summarize([Comparison(item.index, item.initial, item.initial) for item in comparisons])
    table = Table(title=f"{len(comparisons)} validation prompts")
    for title in ("", "policy", "initial policy"):
        table.add_column(title, justify="right" if title else "left")
    for name, value in policy.items():
        compares = "win_rate" in name
        table.add_row(name, f"{value:.4f}", "" if compares else f"{initial[name]:.4f}")
    return table


def _shown(score: float | None) -> str:
    return "" if score is None else f"{score:+.2f}"


def _responses_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table of sampled responses side by side."""
    table = Table(title="sampled responses", show_lines=True)
    for title in ("prompt", "initial policy", "score", "policy", "score"):
        table.add_column(title, overflow="fold", justify="right" if title == "score" else "left")
    for item in comparisons[:SHOWN_PROMPTS]:
        before, after = item.initial.sampled, item.policy.sampled
        cells = (
            item.policy.prompt,
            before.text.strip(),
            _shown(before.score),
            after.text.strip(),
            _shown(after.score),
        )
        # Text: generated text must not be read as markup.
        table.add_row(*(Text(cell) for cell in cells))
    return table
