"""Evaluation of the policy: responses to the validation prompts, scored and compared with those of the initial policy, and
samples of the evaluation sets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import structlog

from quartet.buffer.rollout_stream import RolloutStream
from quartet.buffer.turn_records import TurnRecordStore
from quartet.config.evaluation import EvaluationSetConfig
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
from quartet.data.evaluation_sets import AnswerFinder, EvaluationSet, set_row, summarize_set
from quartet.errors import Cancelled, ComputationFailed, InvalidRequest, ScorerFailed
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_evaluation_row
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.rollout.collector import Collector, CommandWaits
from quartet.system.failpoints import failpoint
from quartet.system.user_function import FunctionWorker

log = structlog.get_logger()


class Evaluator:
    """Evaluator of the policy: two responses to each validation prompt, greedy and sampled, compared with the initial policy's,
    and samples of the evaluation sets.

    The evaluation before the first step is the baseline of all later ones. If another process made it, it is read from the run's
    files. A failure of a later one does not stop training.

    With ``evaluation.generators``, evaluations run on another thread, beside the next step: ``start`` begins one, and ``finish``
    writes its result before that step is committed. So the evaluation of the last committed step is the only one that a process
    can leave unfinished, and the next process begins it again with the same weights.
    """

    def __init__(
        self, run: RunContext, prompts: Sequence[Prompt], tokenizer: Any, sets: Sequence[Sequence[Prompt]] = ()
    ) -> None:
        """``prompts`` come from ``read_validation_prompts``, in order, ``sets`` from ``read_evaluation_sets``.

        A run without evaluations needs none. Starts the processes of the judge and of functions that find answers, if they are
        configured; ``close`` ends them. Raises ConfigError if a function cannot be imported.
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
        self.is_beside_training = config.evaluation.generators > 0
        self._abandoned, self._closed = threading.Event(), threading.Event()
        self._running: _RunningEvaluation | None = None
        scoring = run.clients.scoring(for_training=False)
        self._collector = Collector(
            self._stream,
            scoring,
            config.rollout.score_batch_size,
            turns=self._turns,
            # Only a thread beside training has to look whether its result is still wanted.
            has_command=self._is_unwanted if self.is_beside_training else None,
        )
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        self._baseline: dict[int, PromptResponses] | None = None
        self._workers: list[FunctionWorker | AnswerFinder] = []
        try:
            self._judge = self._start_judge()
            self._sets = [
                EvaluationSet(each, prompts_of_set, self._start_answers(each))
                for each, prompts_of_set in zip(config.evaluation.sets if sets else (), sets, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    def _start_judge(self) -> Judge | None:
        evaluation = self._config.evaluation
        if not self._every or evaluation.judge is None:
            return None
        worker = FunctionWorker(evaluation.judge, "evaluation.judge", quotes=evaluation.quote_texts)
        self._workers.append(worker)
        return Judge(evaluation.judge, worker, evaluation.timeout_seconds)

    def _start_answers(self, each: EvaluationSetConfig) -> AnswerFinder | None:
        finder = AnswerFinder.start(each, self._config)
        if finder is not None:
            self._workers.append(finder)
        return finder

    def resume(self) -> None:
        """Continue after the last evaluation in the run's files. An evaluation in progress is abandoned."""
        self.abandon()
        self._last_step = self._files.last_evaluated_step()

    def is_due(self, step: int, last: bool) -> bool:
        """Return whether to evaluate after ``step``; step 0 is before the first. ``last``: no step follows."""
        if not self._every or step == self._last_step:
            return False
        return step % self._every == 0 or last

    def evaluate_and_report(self, step: int, leader_epoch: int) -> None:
        """Evaluate the policy after ``step`` and report the result. A failure is recorded; at step 0 it is raised."""
        self._last_step = step
        self._board.update(phase="evaluate", num_scored=0, num_expected=self._num_responses)
        self._report(step, lambda: self._compute(step, step, leader_epoch, self._board.show_scored))

    def start(self, step: int, leader_epoch: int) -> None:
        """Begin to evaluate the policy after ``step`` on another thread. ``finish`` must end an earlier evaluation before."""
        assert self._running is None
        self._last_step = step
        result: Future[_Evaluation] = Future()

        def run() -> None:
            try:
                result.set_result(self._compute(step, step, leader_epoch, beside_training=True))
            except BaseException as error:  # The training thread raises it.
                result.set_exception(error)

        thread = threading.Thread(target=run, name="evaluation", daemon=True)
        self._running = _RunningEvaluation(step, thread, result)
        thread.start()

    @property
    def is_running(self) -> bool:
        """True while an evaluation that ``start`` began is not finished."""
        return self._running is not None

    def finish(self, check_lease: Callable[[], None]) -> float:
        """Wait for the evaluation that ``start`` began, if any, and report its result. Return the seconds of the wait.

        ``check_lease`` may raise before anything is written. A failure is recorded; that of step 0 is raised, and so is one of a
        service. Raises Cancelled after ``close``.
        """
        running = self._running
        if running is None:
            return 0.0
        started = time.perf_counter()
        if not running.result.done():
            self._board.update(phase="evaluate")
        running.result.exception()
        check_lease()
        self._report(running.step, running.result.result)
        self._running = None
        return time.perf_counter() - started

    def abandon(self) -> None:
        """Stop the evaluation that ``start`` began, and wait until its thread has ended. Nothing is written."""
        running, self._running = self._running, None
        if running is not None:
            self._abandoned.set()
            running.thread.join()
            self._abandoned.clear()

    def _is_unwanted(self) -> bool:
        return self._abandoned.is_set() or self._closed.is_set()

    def _report(self, step: int, result: Callable[[], _Evaluation]) -> None:
        """Write and report the result of an evaluation. A failure is recorded; at step 0 it is raised."""
        try:
            evaluation = result()
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
        self._write(evaluation)
        summary = evaluation.summary
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
        evaluation = self._compute(step, policy_version, leader_epoch, on_progress)
        self._write(evaluation)
        return evaluation.summary

    def _write(self, evaluation: _Evaluation) -> None:
        version = {"policy_version": evaluation.policy_version}
        self._files.write_evaluation(
            evaluation.step, version | evaluation.summary, evaluation.rows, evaluation.rows_of_sets
        )
        self._baseline = evaluation.baseline

    def _compute(
        self,
        step: int,
        policy_version: int,
        leader_epoch: int,
        on_progress: Callable[[int], None] = lambda scored: None,
        beside_training: bool = False,
    ) -> _Evaluation:
        """Evaluate the policy after ``step``. See ``evaluate``. ``beside_training``: on the generators for evaluations."""
        rollout, scored = self._config.rollout, 0
        weights = self._config_at(max(1, step)).reward.part_weights

        def responses(
            prompts: Sequence[Prompt], sampling: SamplingParameters, samples: int = 1, with_kl: bool = False
        ) -> list[Response]:
            nonlocal scored
            before = scored
            request = _Request(prompts, sampling, samples, policy_version, leader_epoch, beside_training)
            result = self._responses(request, lambda count: on_progress(before + count), weights, with_kl)
            scored += len(result)
            return result

        greedy = responses(self._prompts, greedy_sampling(rollout))
        failpoint("orchestrator.evaluating")
        sampled = responses(self._prompts, run_sampling(rollout), with_kl=True)
        policy = {
            prompt.index: PromptResponses(text, *own)
            for prompt, text, *own in zip(self._prompts, self._texts(self._prompts), greedy, sampled, strict=True)
        }
        baseline = policy if step == 0 else self._read_baseline()
        comparisons = compare(self._prompts, policy, self._by_weights(baseline, weights), self._judge)
        summary, rows = summarize(comparisons), {}
        for each in self._sets:
            found = responses(each.prompts, run_sampling(rollout), each.settings.samples_per_prompt)
            prompts = each.group(self._texts(each.prompts), found)
            summary |= summarize_set(each.settings, prompts)
            rows[each.settings.name] = [
                {"policy_version": policy_version} | set_row(each.settings, prompt) for prompt in prompts
            ]
        # Each response has been checked to be by this version, see ``Collector``.
        version = {"policy_version": policy_version}
        records = [version | row(comparison) for comparison in comparisons]
        return _Evaluation(step, policy_version, summary, records, rows, baseline)

    def forget_turns(self) -> None:
        """Remove the turn records of an evaluation."""
        if self._turns is not None:
            self._turns.forget_step(STEP)

    def close(self) -> None:
        """End an evaluation in progress and the processes of functions. May be called again, and from another thread."""
        self._closed.set()
        for worker in self._workers:
            worker.close()

    @property
    def _num_responses(self) -> int:
        """Number of responses of an evaluation."""
        of_sets = sum(each.settings.samples_per_prompt * len(each.prompts) for each in self._sets)
        return 2 * len(self._prompts) + of_sets

    def _texts(self, prompts: Sequence[Prompt]) -> list[str]:
        ids = [prompt.token_ids for prompt in prompts]
        # Tokenizers decode an empty batch as an empty text.
        return texts_of(self._tokenizer, ids, special_tokens=True) if ids else []

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
        request: _Request,
        on_progress: Callable[[int], None],
        weights: Mapping[str, float],
        with_kl: bool,
    ) -> list[Response]:
        """Return the samples of each prompt, in the order of the prompts. ``with_kl``: also their KL to the reference."""
        if not request.prompts:
            return []
        run, prompts = self._config.run, request.prompts
        # An interrupted evaluation may have left trajectories in the stream. Its turns may be of another sampling.
        self.forget_turns()
        self._collector.reset()
        self._stream.reset(request.leader_epoch)
        # Users answer no prompts of a file, so each response is a single one. And every sample of an evaluation counts.
        episode = None if self._config.has_traffic else episode_settings(self._config.rollout, prompts)
        batch, generation = self._generation.start(
            GenerationBatch(
                stream_name(run.name),
                STEP,
                request.leader_epoch,
                requests_of(stream_name(run.name), STEP, prompts, request.samples),
                request.sampling,
                run.seed,
                request.policy_version,
                episode=episode and replace(episode, kept_samples=0),
            ),
            request.beside_training,
        )
        fields = {prompt.index: prompt.fields for prompt in prompts} if self._config.reward.needs_fields else {}
        try:
            collected = self._collector.collect(batch, generation, on_progress, fields, weights=weights)
        except CommandWaits:
            raise Cancelled("the evaluation was abandoned") from None
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
                item.reference_log_probs if with_kl else None,
                item.parts,
            )
            for item, text in zip(collected.scored, texts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Request:
    """Request for ``samples`` responses to each prompt, by the policy after ``policy_version`` updates.

    ``beside_training``: see ``Generation.start``.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParameters
    samples: int
    policy_version: int
    leader_epoch: int
    beside_training: bool


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Result of an evaluation: its means by metric name, and the rows of the validation prompts and of each set.

    ``baseline``: the initial policy's responses, for the next evaluation.
    """

    step: int
    policy_version: int
    summary: dict[str, float]
    rows: list[dict[str, Any]]
    rows_of_sets: dict[str, list[dict[str, Any]]]
    baseline: dict[int, PromptResponses]


@dataclass(frozen=True, slots=True)
class _RunningEvaluation:
    """An evaluation beside training: the step after which it began, its thread, and its pending result."""

    step: int
    thread: threading.Thread
    result: Future[_Evaluation]
