"""Evaluation of the policy: responses to the validation prompts, scored and compared with those of the initial policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecordStore
from quartet.contract.generation import GenerationBatch, SamplingParameters, requests_of
from quartet.contract.trajectory import Prompt
from quartet.data.evaluation import (
    STEP,
    Judge,
    PromptResponses,
    Response,
    compare,
    episode_settings,
    greedy_sampling,
    rescored,
    responses_of,
    row,
    run_sampling,
    stream_name,
    summarize,
    texts_of,
)
from quartet.errors import ComputationFailed, InvalidRequest, ScorerFailed
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_evaluation_row
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.rollout.collector import Collector
from quartet.system.user_function import FunctionWorker

log = structlog.get_logger()


class Evaluator:
    """Evaluator of the policy: two responses to each validation prompt, greedy and sampled, compared with the initial policy's.

    The evaluation before the first step is the baseline of all later ones. If another process made it, it is read from the run's
    files. A failure of a later one does not stop training.
    """

    def __init__(self, run: RunContext, prompts: Sequence[Prompt], tokenizer: Any) -> None:
        """``prompts`` come from ``read_validation_prompts``, in order. A run without evaluations needs none.

        Starts the judge's process, if a judge is configured; ``close`` ends it. Raises ConfigError if the judge cannot be
        imported.
        """
        config = run.config
        self._config, self._generation, self._files = config, run.generation, run.files
        self._board, self._telemetry, self._every = run.board, run.telemetry, config.evaluation.every_steps
        self._last_step: int | None = None
        # An evaluation uses the weights of an ensemble's parts in the last step.
        self._config_at = run.live_settings.config_at
        self._stream = RolloutStream(run.redis, run.url, stream_name(config.run.name))
        has_turns, name = config.has_environment_service, stream_name(config.run.name)
        self._turns = TurnRecordStore(run.redis, run.url, name) if has_turns else None
        scoring = run.clients.scoring(for_training=False)
        self._collector = Collector(self._stream, scoring, config.rollout.score_batch_size, turns=self._turns)
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        self._baseline: dict[int, PromptResponses] | None = None
        judge = config.evaluation.judge if self._every else None
        self._worker = (
            FunctionWorker(judge, "evaluation.judge", quotes=config.evaluation.quote_texts) if judge else None
        )
        self._judge = Judge(judge, self._worker, config.evaluation.timeout_seconds) if judge and self._worker else None

    def resume(self) -> None:
        """Continue after the last evaluation in the run's files."""
        self._last_step = self._files.last_evaluated_step()

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether to evaluate after ``step``; step 0 is before the first. ``last``: no step follows."""
        if not self._every or step == self._last_step:
            return False
        return step % self._every == 0 or last

    def evaluate_and_report(self, step: int, leader_epoch: int) -> None:
        """Evaluate the policy after ``step`` and report the result. A failure is recorded; at step 0 it is raised."""
        self._last_step = step
        self._board.update(phase="evaluate", num_scored=0, num_expected=2 * len(self._prompts))
        try:
            summary = self.evaluate(step, step, leader_epoch, self._board.show_scored)
        except (ComputationFailed, InvalidRequest) as error:
            if step == 0:
                raise
            self.forget_turns()
            self._files.append_failed_trajectories(failed_evaluation_row(self._config.run.name, step, error))
            # The text of other errors may quote a response, which does not belong in a log.
            cause = str(error) if isinstance(error, ScorerFailed) else type(error).__name__
            log.warning("evaluation failed", step=step, error=cause)
            self._board.note(
                f"evaluation after step {step} failed: {cause}; see failed_trajectories.jsonl; the run continues"
            )
            return
        log.info("evaluation finished", step=step, **summary)
        self._telemetry.evaluated(step, summary)
        metrics = ", ".join(f"{name.removeprefix('eval_').replace('_', ' ')} {summary[name]:.2f}" for name in summary)
        self._board.note(f"evaluation after step {step}: {metrics}")

    def evaluate(
        self,
        step: int,
        policy_version: int,
        leader_epoch: int,
        on_progress: Callable[[int], None] = lambda scored: None,
    ) -> dict[str, float]:
        """Evaluate the policy after ``step``, which has taken ``policy_version`` updates, and write the result to files.

        Returns the means by metric name. ``on_progress`` receives the number of scored responses, two per prompt. Raises the
        error of generation, scoring or judge; nothing is written then.
        """
        rollout, count = self._config.rollout, len(self._prompts)
        weights = self._config_at(max(1, step)).reward.part_weights
        greedy = self._responses(policy_version, leader_epoch, greedy_sampling(rollout), on_progress, weights)
        sampled = self._responses(
            policy_version, leader_epoch, run_sampling(rollout), lambda scored: on_progress(count + scored), weights
        )
        texts = texts_of(self._tokenizer, [prompt.token_ids for prompt in self._prompts], special_tokens=True)
        policy = {
            prompt.index: PromptResponses(text, *responses)
            for prompt, text, *responses in zip(self._prompts, texts, greedy, sampled, strict=True)
        }
        baseline = policy if step == 0 else self._read_baseline()
        comparisons = compare(self._prompts, policy, self._by_weights(baseline, weights), self._judge)
        summary = summarize(comparisons)
        self._files.write_evaluation(step, summary, [row(comparison) for comparison in comparisons])
        self._baseline = baseline
        return summary

    def forget_turns(self) -> None:
        """Remove the turn records of an evaluation."""
        if self._turns is not None:
            self._turns.forget_step(STEP)

    def close(self) -> None:
        """End the judge's process. May be called again."""
        if self._worker is not None:
            self._worker.close()

    def _read_baseline(self) -> dict[int, PromptResponses]:
        return self._baseline or responses_of(self._files.read_evaluation(0), "step-000000.jsonl")

    def _by_weights(
        self, baseline: dict[int, PromptResponses], weights: Mapping[str, float]
    ) -> dict[int, PromptResponses]:
        """Return the initial policy's responses with their scores under ``weights``, which may have changed since."""
        if weights == self._config_at(1).reward.part_weights:
            return baseline
        return rescored(baseline, weights, {part.name for part in self._config.reward.parts if part.optional})

    def _responses(
        self,
        policy_version: int,
        leader_epoch: int,
        sampling: SamplingParameters,
        on_progress: Callable[[int], None],
        weights: Mapping[str, float],
    ) -> list[Response]:
        """Return one response to each prompt, in the order of the prompts."""
        run = self._config.run
        # An interrupted evaluation may have left trajectories in the stream.
        self._collector.reset()
        self._stream.reset(leader_epoch)
        batch, generation = self._generation.start(
            GenerationBatch(
                stream_name(run.name),
                STEP,
                leader_epoch,
                requests_of(stream_name(run.name), STEP, self._prompts, samples=1),
                sampling,
                run.seed,
                policy_version,
                # Users answer no prompts of a file, so each has one response.
                episode=None if self._config.has_traffic else episode_settings(self._config.rollout, self._prompts),
            )
        )
        fields = {prompt.index: prompt.fields for prompt in self._prompts} if self._config.reward.needs_fields else {}
        collected = self._collector.collect(batch, generation, on_progress, fields, weights=weights)
        self._collector.reset()
        self._stream.acknowledge(collected.entry_ids)
        self.forget_turns()
        # Of several branches, the last one, which the reward sources have scored.
        responses = [item.trajectory.branches[-1].response_ids for item in collected.scored]
        texts = texts_of(self._tokenizer, responses, special_tokens=False)
        return [
            Response.of(
                item.trajectory,
                text,
                item.score,
                item.reference_log_probs if sampling.temperature else None,
                item.parts,
            )
            for item, text in zip(collected.scored, texts, strict=True)
        ]
