"""The run: step after step, each a transaction of prepare, apply, commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from quartet.buffer.connection import connect
from quartet.buffer.experience import ExperienceStore
from quartet.buffer.rollouts import RolloutStream
from quartet.config import Config
from quartet.data import PromptOrder, encode_prompts, read_prompt_lines
from quartet.errors import Cancelled, ConfigError, MismatchError, ServiceUnavailable
from quartet.files import check_saved
from quartet.models.loading import load_tokenizer
from quartet.ppo import kl
from quartet.rpc.clients import ActorClient, CriticClient, ReferenceClient, RewardClient
from quartet.telemetry.run_files import RunFiles
from quartet.types import (
    MODEL_ROLES,
    FinishReason,
    OptimizationSettings,
    PolicyLossSettings,
    Role,
    SamplingParameters,
    SaveKind,
    ServiceStatus,
    TrajectoryId,
    UpdateResult,
    ValueLossSettings,
)
from services.orchestrator.checkpoints import Checkpoints
from services.orchestrator.collector import CollectedStep, Collector, ScoringServices, wait_for_all
from services.orchestrator.experience import PreparedStep, ScoreMoments, prepare_step, score_moments
from services.orchestrator.progress import ProgressBoard, RunState

log = structlog.get_logger()

LEADER_EPOCH = 1
"""Term of the lease. One orchestrator leads a run from start to end, so there is one term."""


class Training:
    """One run from its first step to its saved policy."""

    def __init__(self, config: Config, url: str, board: ProgressBoard) -> None:
        """Connects to the buffer at ``url``. Raises ConfigError or ServiceUnavailable."""
        self._config, self._board = config, board
        self._run = config.run.name
        self._files = RunFiles(config.run_directory)
        self._stopping = threading.Event()
        client = connect(url)
        self._stream = RolloutStream(client, url, self._run)
        self._experience = ExperienceStore(client, url, self._run)
        addresses = {role: getattr(config.services, role).address for role in MODEL_ROLES}
        for role, address in addresses.items():
            if address is None:
                raise ConfigError(f"services.{role}.address: null; the orchestrator needs to know where the {role} is")
        self._actor = ActorClient(addresses[Role.ACTOR], config.timeouts)
        self._critic = CriticClient(addresses[Role.CRITIC], config.timeouts)
        self._reward = RewardClient(addresses[Role.REWARD], config.timeouts)
        self._reference = ReferenceClient(addresses[Role.REFERENCE], config.timeouts)
        scoring = ScoringServices(self._reward, self._reference, self._critic, config.rollout.temperature)
        self._collector = Collector(self._stream, scoring, config.rollout.score_batch)
        self._checkpoints = Checkpoints(self._files, config.checkpoint.keep, config.to_yaml())
        controller = config.algorithm.kl_controller
        self._kl = kl.make_kl_controller(
            controller.kind, config.algorithm.kl_coefficient, controller.target, controller.horizon
        )
        self._moments = ScoreMoments()
        self._tokenizer: Any = None

    def request_stop(self) -> None:
        """Stops the run after the step in hand."""
        self._stopping.set()

    def run(self) -> None:
        """Trains. Raises the first thing that goes wrong; nothing is committed of a step that failed."""
        order = self._prepare()
        self._board.update(state=RunState.TRAINING, phase="generate")
        step = 0
        while step < self._config.run.steps and not self._stopping.is_set():
            step += 1
            self._take_step(step, order)
            if self._checkpoint_is_due(step):
                self._board.update(phase="checkpoint")
                self._checkpoints.save(self._run, step, LEADER_EPOCH, self._actor, self._critic, self._state())
        self._board.update(phase="save")
        saving = self._actor.save(self._run, LEADER_EPOCH, self._files.policy.name, SaveKind.MODEL)
        wait_for_all([saving])
        check_saved(self._files.root, saving.result())
        log.info("policy saved", path=str(self._files.policy), step=step)
        finished = step == self._config.run.steps
        self._board.update(state=RunState.FINISHED if finished else RunState.STOPPED, phase="done")

    def _checkpoint_is_due(self, step: int) -> bool:
        every = self._config.checkpoint.every
        last = step == self._config.run.steps or self._stopping.is_set()
        return every > 0 and (step % every == 0 or last)

    def _prepare(self) -> PromptOrder:
        lines = read_prompt_lines(self._config.data.prompts)
        self._tokenizer = load_tokenizer(self._config.actor.model)
        clients = (self._actor, self._critic, self._reward, self._reference)
        statuses: dict[Role, ServiceStatus] = {}
        for client in clients:
            self._board.update(phase=f"waiting for {client.role}")
            try:
                statuses[client.role] = client.wait_until_ready(self._raise_if_stopping)
            except ServiceUnavailable as error:
                # Nothing has begun yet, so this is something to mend rather than a failure of the run.
                raise ConfigError(str(error)) from None
        self._check_agreement(statuses)
        stop_ids = {self._tokenizer.eos_token_id} - {None}
        prompts = encode_prompts(
            self._config.data.prompts,
            lines,
            lambda texts: self._tokenizer(texts)["input_ids"] if texts else [],
            frozenset(stop_ids),
            statuses[Role.ACTOR].vocabulary_size,
            self._config.data.max_prompt_tokens,
        )
        for note in prompts.notes:
            log.warning(note)
            self._board.note(note)
        self._check_lengths(statuses, max(len(prompt.token_ids) for prompt in prompts.prompts))
        order = PromptOrder(prompts.prompts, self._config.rollout.prompts_per_step, self._config.run.seed)
        self._stream.reset()
        self._experience.reset()
        return order

    def _check_agreement(self, statuses: dict[Role, ServiceStatus]) -> None:
        actor = statuses[Role.ACTOR]
        # The reward before the critic, which starts from it unless told otherwise: an error is to name a key that is in the file.
        for role in (Role.REWARD, Role.CRITIC, Role.REFERENCE):
            other = statuses[role]
            if other.tokenizer_fingerprint != actor.tokenizer_fingerprint:
                raise MismatchError(
                    f"{role}.model {other.model}: its vocabulary ({other.vocabulary_size} ids) is not that of actor.model "
                    f"{actor.model} ({actor.vocabulary_size} ids), expected the same tokenizer: a token id would mean "
                    f"two things; give a {role} model trained with the actor's tokenizer"
                )
            if other.vocabulary_size < actor.vocabulary_size:
                raise MismatchError(
                    f"{role}.model {other.model}: embeds {other.vocabulary_size} token ids, actor.model {actor.model} can draw "
                    f"{actor.vocabulary_size}; resize the {role} model's embeddings to at least as many"
                )
        for role in (Role.ACTOR, Role.CRITIC):
            if statuses[role].policy_version:
                raise MismatchError(
                    f"services.{role}.address: the {role} there has taken {statuses[role].policy_version} updates of run "
                    f"{statuses[role].run}; a new run starts from its model, so restart that service"
                )

    def _check_lengths(self, statuses: dict[Role, ServiceStatus], longest_prompt: int) -> None:
        longest = longest_prompt + self._config.rollout.max_response_tokens
        for role, status in statuses.items():
            if 0 < status.max_sequence_tokens < longest:
                raise ConfigError(
                    f"rollout.max_response_tokens {self._config.rollout.max_response_tokens}: with the longest prompt, of "
                    f"{longest_prompt} tokens, more than the {status.max_sequence_tokens} positions of {role}.model "
                    f"{status.model}; lower it, or data.max_prompt_tokens"
                )

    def _take_step(self, step: int, order: PromptOrder) -> None:
        start = time.perf_counter()
        collected = self._generate_and_score(step, order)
        if step == 1 and self._config.reward.normalize:
            self._moments = score_moments(collected.scored)
        prepared = prepare_step(
            self._run, step, step - 1, collected.scored, self._config.algorithm, self._kl.value, self._moments
        )
        self._experience.seal(prepared.experience)
        self._board.update(phase="update")
        updating = time.perf_counter()
        policy, value = self._update(step)
        end = time.perf_counter()
        metrics = {
            "step": step,
            **prepared.metrics,
            **_update_metrics(policy, value),
            "learning_rate_actor": self._config.actor.learning_rate,
            "learning_rate_critic": self._config.critic.learning_rate,
            "seconds": end - start,
            "seconds_generate": collected.seconds_generate,
            "seconds_score": collected.seconds_score,
            "seconds_update": end - updating,
        }
        self._commit(step, collected, prepared, metrics)

    def _generate_and_score(self, step: int, order: PromptOrder) -> CollectedStep:
        rollout = self._config.rollout
        prompts = order.of_step(step)
        samples = range(rollout.samples_per_prompt)
        expected = {TrajectoryId(self._run, step, prompt.index, sample) for prompt in prompts for sample in samples}
        self._board.update(phase="generate", scored=0, wanted=len(expected))
        sampling = SamplingParameters(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k)
        generation = self._actor.generate(
            run=self._run,
            step=step,
            leader_epoch=LEADER_EPOCH,
            prompts=prompts,
            samples_per_prompt=rollout.samples_per_prompt,
            sampling=sampling,
            seed=self._config.run.seed,
            policy_version=step - 1,
        )
        return self._collector.collect(expected, step - 1, generation, self._show_scored)

    def _show_scored(self, scored: int) -> None:
        if self._board.current().scored != scored:
            self._board.update(scored=scored)

    def _update(self, step: int) -> tuple[UpdateResult, UpdateResult]:
        algorithm, actor, critic = self._config.algorithm, self._config.actor, self._config.critic

        def settings(learning_rate: float, max_grad_norm: float) -> OptimizationSettings:
            return OptimizationSettings(
                algorithm.epochs, algorithm.mini_batches, learning_rate, max_grad_norm, self._config.run.seed
            )

        policy_loss = PolicyLossSettings(
            temperature=self._config.rollout.temperature,
            clip_low=algorithm.clip_ratio,
            clip_high=algorithm.clip_ratio_high or algorithm.clip_ratio,
            dual_clip=algorithm.dual_clip or 0.0,
            entropy_bonus=algorithm.entropy_bonus,
            kl_loss=algorithm.kl_loss,
            kl_loss_coefficient=algorithm.kl_loss_coefficient,
        )
        policy = self._actor.update(
            self._run, step, LEADER_EPOCH, settings(actor.learning_rate, actor.optimizer.max_grad_norm), policy_loss
        )
        value = self._critic.update(
            self._run,
            step,
            LEADER_EPOCH,
            settings(critic.learning_rate, critic.optimizer.max_grad_norm),
            ValueLossSettings(algorithm.value_clip),
        )
        wait_for_all([policy, value])
        return policy.result(), value.result()

    def _commit(self, step: int, collected: CollectedStep, prepared: PreparedStep, metrics: dict[str, float]) -> None:
        self._kl.update(metrics["kl_mean"], len(collected.scored))
        self._files.write_trajectories(step, self._trajectory_lines(collected, prepared))
        self._files.append_metrics(metrics)
        self._stream.acknowledge(collected.entry_ids)
        self._experience.discard(step)
        self._board.commit(step, metrics)
        log.info("step", **{name: metrics[name] for name in ("step", "reward_mean", "kl_mean", "seconds")})

    def _trajectory_lines(self, collected: CollectedStep, prepared: PreparedStep) -> list[dict[str, Any]]:
        trajectories = [item.trajectory for item in collected.scored]
        prompts = self._tokenizer.batch_decode([t.prompt_ids for t in trajectories])
        responses = self._tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
        return [
            {
                "id": str(item.trajectory.id),
                "policy_version": item.trajectory.policy_version,
                "prompt": prompt,
                "response": response,
                "score": item.score,
                "kl": float(response_kl),
                "response_tokens": len(item.trajectory.response_ids),
                "finished": item.trajectory.finish_reason is FinishReason.EOS,
            }
            for item, prompt, response, response_kl in zip(
                collected.scored, prompts, responses, prepared.response_kl, strict=True
            )
        ]

    def _state(self) -> dict[str, Any]:
        return {
            "kl_controller": self._kl.state(),
            "score_moments": {"mean": self._moments.mean, "std": self._moments.std},
        }

    def _raise_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise Cancelled("stopped while waiting for the services")


_POLICY_METRICS = {
    "policy_loss": "policy_loss",
    "clip_fraction": "clip_fraction",
    "approx_kl": "approx_kl",
    "entropy": "entropy",
    "rollout_mismatch_kl": "rollout_mismatch_kl",
    "grad_norm": "grad_norm_actor",
}
_VALUE_METRICS = {
    "value_loss": "value_loss",
    "value_clip_fraction": "value_clip_fraction",
    "grad_norm": "grad_norm_critic",
}


def _update_metrics(policy: UpdateResult, value: UpdateResult) -> dict[str, float]:
    """The services' own figures under the names that they have everywhere."""
    found = {public: policy.metrics[name] for name, public in _POLICY_METRICS.items()}
    return found | {public: value.metrics[name] for name, public in _VALUE_METRICS.items()}


def train(training: Training, board: ProgressBoard, finished: Callable[[int], None]) -> None:
    """Runs the training to its end, notes how it ended on the board, and passes its exit status on."""
    try:
        training.run()
    except Cancelled as error:
        board.update(state=RunState.STOPPED, phase="done", error=str(error))
        finished(0)
    except Exception as error:
        log.error("run failed", exc_info=error)
        code = 2 if isinstance(error, ConfigError) else 1
        board.update(state=RunState.FAILED, phase="failed", error=str(error) or type(error).__name__, exit_code=code)
        finished(code)
    else:
        finished(0)
