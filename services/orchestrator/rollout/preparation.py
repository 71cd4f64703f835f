"""Preparing a step: its trajectories generated and scored, and what actor and critic will learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config import Config
from quartet.evaluation import run_sampling
from quartet.rpc.clients import PendingResult
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.control.progress import ProgressBoard
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector, Replacement
from quartet.services.orchestrator.service_clients import ServiceClients
from quartet.services.orchestrator.telemetry.timeline import Timeline
from quartet.types import Prompt, Role, TrajectoryId


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A step that is prepared, and its experience sealed."""

    step: int
    collected: CollectedStep
    prepared: PreparedStep


class Preparation:
    """Asks for a step's trajectories and their scores, and makes experience of them."""

    def __init__(
        self,
        config: Config,
        service_clients: ServiceClients,
        stream: RolloutStream,
        board: ProgressBoard,
        timeline: Timeline,
    ) -> None:
        self._config, self._actor, self._board, self._timeline = config, service_clients.actor, board, timeline
        self._ahead: tuple[int, PendingResult[int]] | None = None
        self._collector = Collector(stream, service_clients.scoring(), config.rollout.score_batch_size, timeline.watch)

    def begin(self, step: int, prompts: Sequence[Prompt], leader_epoch: int, policy_version: int) -> None:
        """Begins the step's generation ahead of ``prepare``, while the step before is brought to its end."""
        if self._ahead is None:
            samples = self._config.rollout.samples_per_prompt
            call = self._generate(step, prompts, leader_epoch, policy_version, 0, samples)
            self._ahead = step, call
            if policy_version < step - 1:
                # From then on its weights stay, whatever the policy goes on to learn.
                call.wait_until_begun()

    def discard(self) -> None:
        """Cancels what has been begun ahead: the actor is wanted for something else first. What it has made comes again."""
        if self._ahead is not None:
            self._ahead[1].cancel()
        self._ahead = None

    def prepare(
        self,
        step: int,
        prompts: Sequence[Prompt],
        leader_epoch: int,
        policy_version: int,
        algorithm_state: AlgorithmState,
    ) -> SealedStep:
        """The step's experience, under what ``course`` remembers of the steps before. Raises as the collector."""
        collected = self._collect(step, prompts, leader_epoch, policy_version)
        with self._timeline.part(Role.ORCHESTRATOR, "prepare"):
            return self._sealed(step, collected, policy_version, algorithm_state)

    def _sealed(
        self, step: int, collected: CollectedStep, policy_version: int, algorithm_state: AlgorithmState
    ) -> SealedStep:
        scores = [item.score for item in collected.scored]
        prepared = prepare_step(
            self._config.run.name,
            step,
            policy_version,
            collected.scored,
            self._config.algorithm,
            algorithm_state.kl_coefficient,
            algorithm_state.moments(scores),
            self._config.rollout.max_response_tokens,
        )
        return SealedStep(step, collected, prepared)

    def _collect(self, step: int, prompts: Sequence[Prompt], leader_epoch: int, policy_version: int) -> CollectedStep:
        config, samples = self._config, self._config.rollout.samples_per_prompt
        expected = {
            TrajectoryId(config.run.name, step, prompt.index, sample) for prompt in prompts for sample in range(samples)
        }
        self._board.update(phase="generate", scored=0, wanted=len(expected))

        ahead, self._ahead = self._ahead, None
        if ahead is None:
            generation = self._generate(step, prompts, leader_epoch, policy_version, 0, samples)
        else:
            begun, generation = ahead
            assert begun == step, f"step {begun} was begun, not {step}"

        def replace(indices: set[int], sample: int) -> PendingResult[int]:
            wanted = [prompt for prompt in prompts if prompt.index in indices]
            return self._generate(step, wanted, leader_epoch, step - 1, sample, 1)

        return self._collector.collect(
            expected,
            policy_version,
            generation,
            self._board.show_scored,
            {prompt.index: prompt.fields for prompt in prompts} if config.reward.has_functions else {},
            # By then the policy has taken all updates before the step, whichever generated the others.
            Replacement(config.recovery, step - 1, replace),
        )

    def _generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        leader_epoch: int,
        policy_version: int,
        first_sample: int,
        samples: int,
    ) -> PendingResult[int]:
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
        self._timeline.watch(Role.ACTOR, "generate", call)
        return call
