"""`quartet evaluate`: compare a saved policy with the initial policy, in this process, with the metrics of evaluations in a
run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from quartet.cli.console import make_console
from quartet.config.evaluation import EvaluationSetConfig
from quartet.config.loading import load_config
from quartet.config.prompt_sets import SET_FIELD
from quartet.config.root import Config
from quartet.contract.generation import SamplingParameters, requests_of
from quartet.contract.trajectory import Prompt, TokenBatch, Trajectory
from quartet.data.evaluation import (
    STEP,
    Comparison,
    Judge,
    PromptResponses,
    Response,
    compare,
    greedy_sampling,
    read_validation_prompts,
    row,
    run_sampling,
    stream_name,
    summarize,
    texts_of,
)
from quartet.data.evaluation_sets import (
    AnswerFinder,
    EvaluationSet,
    SampledPrompt,
    read_evaluation_sets,
    set_row,
    summarize_set,
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
            result = compare_with_initial(checkpoint, config, device)
        except InvalidRequest as error:
            raise ConfigError(f"evaluate {checkpoint}: {error}") from None
    for note in result.notes:
        console.print(note, soft_wrap=True)
    if output is not None:
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in result.rows())
        output.write_text("".join(lines), encoding="utf-8")
    if as_json:
        print(json.dumps(result.policy_metrics()))
    else:
        console.print(_summary_table(result))
        if result.comparisons:
            console.print(_responses_table(result.comparisons))


def _config_of_run(checkpoint: str) -> Path:
    run = find_run(Path(checkpoint))
    if run is None:
        raise ConfigError(f"evaluate {checkpoint}: is not in the directory of a run; give the config with --config")
    if stage := run.stage_name():
        raise ConfigError(
            f"evaluate {checkpoint}: is of a run of quartet {stage}; give the config of one of quartet train with --config"
        )
    return run.config


@dataclass(frozen=True, slots=True)
class LocalEvaluation:
    """Comparisons on the validation prompts, the samples of both policies for each of ``sets``, and notes for the user."""

    comparisons: Sequence[Comparison]
    sets: Sequence[EvaluationSetConfig]
    policy: Sequence[Sequence[SampledPrompt]]
    initial: Sequence[Sequence[SampledPrompt]]
    notes: Sequence[str]

    def policy_metrics(self) -> dict[str, float]:
        """Return the metrics of the policy by name."""
        return summarize(self.comparisons) | self._of_sets(self.policy)

    def initial_metrics(self) -> dict[str, float]:
        """Return the metrics of the initial policy by name."""
        tied = [Comparison(item.index, item.initial, item.initial) for item in self.comparisons]
        return summarize(tied) | self._of_sets(self.initial)

    def _of_sets(self, samples: Sequence[Sequence[SampledPrompt]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for each, prompts in zip(self.sets, samples, strict=True):
            found |= summarize_set(each, prompts)
        return found

    def rows(self) -> list[Mapping[str, Any]]:
        """Return one object for each prompt. Those of sets have the name of the set, too."""
        rows: list[Mapping[str, Any]] = [row(comparison) for comparison in self.comparisons]
        for each, prompts in zip(self.sets, self.policy, strict=True):
            rows += [{SET_FIELD: each.name} | set_row(each, prompt) for prompt in prompts]
        return rows


def compare_with_initial(checkpoint: str, config: Config, device: str) -> LocalEvaluation:
    """Compare the responses of a saved policy and the initial policy to the prompts of an evaluation.

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

        def tokenizer_of_actor() -> Any:
            return load_tokenizer(config.actor.model)

        prompts, notes, sets = list[Prompt](), list[str](), list[EvaluationSet]()
        if config.data.has_validation or not config.evaluation.sets:
            validation = read_validation_prompts(config, tokenizer_of_actor, vocabulary)
            prompts, notes = list(validation.prompts), list(validation.notes)
        read = read_evaluation_sets(config, tokenizer_of_actor, vocabulary)
        for each, prompts_of_set in zip(config.evaluation.sets, read, strict=True):
            finder = AnswerFinder.start(each, config)
            if finder is not None:
                stack.callback(finder.close)
            sets.append(EvaluationSet(each, prompts_of_set.prompts, finder))
            notes += [f"{each.name}: {note}" for note in prompts_of_set.notes]
        reward = build_reward(config, device) if config.has_reward else None
        if reward is not None:
            stack.callback(reward.close)
        evaluator = _LocalEvaluator(config, tokenizer, prompts, sets, reward, device)
        responses, samples = evaluator.responses(policy)
        del policy  # Free its memory before the initial policy generates.
        initial, initial_samples = evaluator.responses(evaluator.initial_policy())
        comparisons = compare(prompts, responses, initial, judge)
        return LocalEvaluation(comparisons, config.evaluation.sets, samples, initial_samples, notes)


class _LocalEvaluator:
    """Evaluator that generates responses with a policy and scores them with reward and reference, as the services do."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        sets: Sequence[EvaluationSet],
        reward: RewardSource | None,
        device: str,
    ) -> None:
        self._config, self._tokenizer, self._prompts, self._sets = config, tokenizer, prompts, sets
        self._reward = reward
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

    def responses(self, policy: Any) -> tuple[dict[int, PromptResponses], list[list[SampledPrompt]]]:
        """Return the responses of the policy to the validation prompts, by prompt index, and to the prompts of each set."""
        rollout = self._config.rollout
        stop_ids, decode = stop_token_ids(policy, self._tokenizer), token_decoder(self._tokenizer)
        engine = TorchEngine(policy, stop_ids, rollout.max_concurrent_sequences, decode=decode)
        greedy = self._generate(engine, self._prompts, greedy_sampling(rollout))
        sampled = self._generate(engine, self._prompts, run_sampling(rollout), with_kl=True)
        pairs = {
            prompt.index: PromptResponses(text, *own)
            for prompt, text, *own in zip(self._prompts, self._texts(self._prompts), greedy, sampled, strict=True)
        }
        sets = []
        for each in self._sets:
            found = self._generate(engine, each.prompts, run_sampling(rollout), each.settings.samples_per_prompt)
            sets.append(each.group(self._texts(each.prompts), found))
        return pairs, sets

    def _texts(self, prompts: Sequence[Prompt]) -> list[str]:
        return (
            texts_of(self._tokenizer, [prompt.token_ids for prompt in prompts], special_tokens=True) if prompts else []
        )

    def _generate(
        self,
        engine: TorchEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingParameters,
        samples: int = 1,
        with_kl: bool = False,
    ) -> list[Response]:
        """Return the samples of each prompt, in the order of the prompts."""
        if not prompts:
            return []
        run, size = self._config.run, self._config.rollout.score_batch_size
        requests = requests_of(stream_name(run.name), STEP, prompts, samples)
        fields = {prompt.index: prompt.fields for prompt in prompts} if self._config.reward.needs_fields else {}
        # Same order and batch size as in a run, for bit-identical scores.
        finished = engine.trajectories(requests, sampling, run.seed)
        responses: list[Response] = []
        for start in range(0, len(finished), size):
            responses += self._scored(finished[start : start + size], fields, with_kl)
        return responses

    def _scored(self, trajectories: list[Trajectory], fields_of: Mapping[int, str], with_kl: bool) -> list[Response]:
        batch = TokenBatch.of(trajectories)
        fields = [fields_of[trajectory.id.prompt] for trajectory in trajectories] if fields_of else []
        scores: list[float | None] = [None] * len(trajectories)
        if self._reward is not None:
            scores = self._reward.score(batch, fields).total.tolist()
        references: list[Any] = [None] * len(trajectories)
        if with_kl:
            flat = response_log_probs(self._reference, batch, self._config.rollout.temperature, self._reference_tokens)
            references = np.split(flat, np.cumsum(batch.response_lengths)[:-1])
        texts = texts_of(self._tokenizer, [item.response_ids for item in trajectories], special_tokens=False)
        return [
            Response.of(item, text, score, reference)
            for item, text, score, reference in zip(trajectories, texts, scores, references, strict=True)
        ]


def _summary_table(result: LocalEvaluation) -> Table:
    """Return a table of the means of policy and initial policy."""
    policy, initial = result.policy_metrics(), result.initial_metrics()
    counts = [
        (len(result.comparisons), "validation"),
        *((len(p), s.name) for s, p in zip(result.sets, result.policy, strict=True)),
    ]
    table = Table(title=", ".join(f"{count} {name} prompts" for count, name in counts if count))
    for title in ("", "policy", "initial policy"):
        table.add_column(title, justify="right" if title else "left")
    for name, value in policy.items():
        compares = name in ("eval_win_rate_greedy", "eval_win_rate_sampled", "eval_judge_win_rate")
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
