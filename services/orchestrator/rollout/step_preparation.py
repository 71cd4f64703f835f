"""Preparation of a step: generate and score its trajectories, and compute the experience that the models learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config
from quartet.evaluation import run_sampling
from quartet.rpc.pending_calls import PendingGeneration
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector, ReplacementRule
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.services.orchestrator.telemetry.step_profiler import StepProfiler
from quartet.types import Prompt, Role, TrajectoryId


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is prepared and not committed."""

    step: int
    collected: CollectedStep
    prepared: PreparedStep


class StepPreparation:
    """Preparation of steps: requests trajectories and scores, and computes the experience."""

    def __init__(
        self,
        config: Config,
        service_clients: ServiceClients,
        stream: RolloutStream,
        board: ProgressBoard,
        profiler: StepProfiler,
    ) -> None:
        self._config, self._actor, self._board, self._profiler = config, service_clients.actor, board, profiler
        self._prefetched: tuple[int, PendingGeneration] | None = None
        self._collector = Collector(
            stream, service_clients.scoring(), config.rollout.score_batch_size, profiler.observe
        )

    def start_generation(self, step: int, prompts: Sequence[Prompt], leader_epoch: int, policy_version: int) -> None:
        """Start the generation of ``step`` before ``prepare``, while the step before it ends. Has no effect if it has started."""
        if self._prefetched is None:
            samples = self._config.rollout.samples_per_prompt
            call = self._generate(step, prompts, leader_epoch, policy_version, 0, samples)
            self._prefetched = step, call
            if policy_version < step - 1:
                # Once generation has begun, the engine keeps these weights while the policy takes its next update.
                call.wait_until_started()

    def discard(self) -> None:
        """Cancel a generation that has started early, because the actor is needed first. Its trajectories are generated again."""
        if self._prefetched is not None:
            self._prefetched[1].cancel()
        self._prefetched = None

    def prepare(
        self,
        step: int,
        prompts: Sequence[Prompt],
        leader_epoch: int,
        policy_version: int,
        algorithm_state: AlgorithmState,
    ) -> PendingStep:
        """Return the experience of ``step``. Raises like ``Collector.collect``."""
        with self._profiler.span(Role.ORCHESTRATOR, "collect", waits=True):
            collected = self._collect(step, prompts, leader_epoch, policy_version)
        with self._profiler.span(Role.ORCHESTRATOR, "prepare"):
            prepared = prepare_step(
                self._config.run.name,
                step,
                policy_version,
                collected.scored,
                self._config.algorithm,
                algorithm_state.kl_coefficient,
                algorithm_state.moments([item.score for item in collected.scored]),
                self._config.rollout.max_response_tokens,
            )
            return PendingStep(step, collected, prepared)

    def _collect(self, step: int, prompts: Sequence[Prompt], leader_epoch: int, policy_version: int) -> CollectedStep:
        config, samples = self._config, self._config.rollout.samples_per_prompt
        expected = {
            TrajectoryId(config.run.name, step, prompt.index, sample) for prompt in prompts for sample in range(samples)
        }
        self._board.update(phase="generate", num_scored=0, num_expected=len(expected))

        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            generation = self._generate(step, prompts, leader_epoch, policy_version, 0, samples)
        else:
            started_step, generation = prefetched
            assert started_step == step, f"generation of step {started_step} has started, expected step {step}"

        def replace(indices: set[int], sample: int) -> PendingGeneration:
            failed = [prompt for prompt in prompts if prompt.index in indices]
            return self._generate(step, failed, leader_epoch, step - 1, sample, 1)

        return self._collector.collect(
            expected,
            policy_version,
            generation,
            self._board.show_scored,
            {prompt.index: prompt.fields for prompt in prompts} if config.reward.has_functions else {},
            # By then the policy has taken all updates before this step, whichever version generated the other samples.
            ReplacementRule(config.recovery, step - 1, replace),
        )

    def _generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        leader_epoch: int,
        policy_version: int,
        first_sample: int,
        samples: int,
    ) -> PendingGeneration:
        config = self._config
        call = self._actor.generate(
            run=config.run.name,
            step=step,
            leader_epoch=leader_epoch,
            prompts=prompts,
            samples_per_prompt=samples,
            sampling=run_sampling(config.rollout),
            seed=config.run.seed,
            policy_version=policy_version,
            first_sample=first_sample,
        )
        self._profiler.observe(Role.ACTOR, "generate", call)
        return call
