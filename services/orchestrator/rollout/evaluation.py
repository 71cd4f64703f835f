"""Evaluating the policy of a run: responses to the validation prompts, scored and held against the initial policy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config
from quartet.evaluation import (
    STEP,
    Answers,
    Judge,
    Response,
    answers_of,
    compare,
    greedy_sampling,
    row,
    run_sampling,
    stream_name,
    summarize,
    texts_of,
    trajectory_id,
)
from quartet.rewards.function_worker import FunctionWorker
from quartet.rpc.clients import ActorClient
from quartet.run_directory.run_files import RunFiles
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.types import Prompt, SamplingParameters


class Evaluator:
    """Asks the actor for two responses to each validation prompt, greedy and sampled, and says how they compare.

    The evaluation before the first step is what all later ones are held against; it is read back from the run's files where
    another process made it.
    """

    def __init__(
        self,
        config: Config,
        actor: ActorClient,
        stream: RolloutStream,
        scoring: ScoringServices,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        files: RunFiles,
    ) -> None:
        """``stream`` is that of ``quartet.evaluation.stream_name``; ``prompts`` are ``read_validation_prompts``', in their order.

        Starts the judge's process, if there is a judge; ``close`` ends it. Raises ConfigError when it cannot be imported.
        """
        self._config, self._actor, self._stream = config, actor, stream
        self._collector = Collector(stream, scoring, config.rollout.score_batch_size)
        self._prompts = list(prompts)
        self._tokenizer, self._files = tokenizer, files
        self._initial: dict[int, Answers] | None = None
        judge = config.evaluation.judge
        self._worker = FunctionWorker(judge, "evaluation.judge") if judge else None
        self._judge = Judge(judge, self._worker, config.evaluation.timeout_seconds) if judge and self._worker else None

    @property
    def responses(self) -> int:
        """Responses of one evaluation."""
        return 2 * len(self._prompts)

    def is_due(self, step: int, last: bool) -> bool:
        """Whether there is an evaluation after ``step``; step 0 is before the first. ``last``: no step follows."""
        every = self._config.evaluation.every_steps
        return every > 0 and (step % every == 0 or last)

    def evaluate(
        self,
        step: int,
        policy_version: int,
        leader_epoch: int,
        on_progress: Callable[[int], None] = lambda scored: None,
    ) -> dict[str, float]:
        """Evaluates the policy after ``step``, which has taken ``policy_version`` updates, and writes the run's files.

        Gives the means by metric name. ``on_progress`` hears how many responses have been scored, two for each prompt. Raises
        what generation, scoring or the judge fails with; nothing is written then.
        """
        rollout, count = self._config.rollout, len(self._prompts)
        greedy = self._responses(policy_version, leader_epoch, greedy_sampling(rollout), on_progress)
        sampled = self._responses(
            policy_version, leader_epoch, run_sampling(rollout), lambda scored: on_progress(count + scored)
        )
        texts = texts_of(self._tokenizer, [prompt.token_ids for prompt in self._prompts], special_tokens=True)
        policy = {
            prompt.index: Answers(text, *responses)
            for prompt, text, *responses in zip(self._prompts, texts, greedy, sampled, strict=True)
        }
        initial = policy if step == 0 else self._initial_answers()
        comparisons = compare(self._prompts, policy, initial, self._judge)
        summary = summarize(comparisons)
        self._files.write_evaluation(step, summary, [row(comparison) for comparison in comparisons])
        self._initial = initial
        return summary

    def close(self) -> None:
        """Ends the judge's process. May be called again."""
        if self._worker is not None:
            self._worker.close()

    def _initial_answers(self) -> dict[int, Answers]:
        return self._initial or answers_of(self._files.read_evaluation(0), "step-000000.jsonl")

    def _responses(
        self,
        policy_version: int,
        leader_epoch: int,
        sampling: SamplingParameters,
        on_progress: Callable[[int], None],
    ) -> list[Response]:
        """One response to each prompt, in the order of the prompts."""
        run = self._config.run
        # Nothing of an evaluation that broke off may be met here.
        self._stream.reset(leader_epoch)
        generation = self._actor.generate(
            run=stream_name(run.name),
            step=STEP,
            leader_epoch=leader_epoch,
            prompts=self._prompts,
            samples_per_prompt=1,
            sampling=sampling,
            seed=run.seed,
            policy_version=policy_version,
        )
        fields = {prompt.index: prompt.fields for prompt in self._prompts} if self._config.reward.has_functions else {}
        collected = self._collector.collect(
            {trajectory_id(run.name, prompt) for prompt in self._prompts},
            policy_version,
            generation,
            on_progress,
            fields,
        )
        self._stream.acknowledge(collected.entry_ids)
        responses = [item.trajectory.response_ids for item in collected.scored]
        texts = texts_of(self._tokenizer, responses, special_tokens=False)
        return [
            Response.of(item.trajectory, text, item.score, item.reference_log_probs if sampling.temperature else None)
            for item, text in zip(collected.scored, texts, strict=True)
        ]
