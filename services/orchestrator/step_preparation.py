"""Preparation of a step: generate and score its trajectories, and compute the experience that the models learn from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quartet.config.live_settings import with_values
from quartet.contract.generation import GenerationBatch, GenerationRequest, requests_of
from quartet.contract.status import Role
from quartet.contract.trajectory import Prompt
from quartet.contract.weights import PublishedWeights
from quartet.data.evaluation import episode_settings, run_sampling
from quartet.errors import FailedPrecondition
from quartet.services.orchestrator.algorithm.experience import PreparedStep, prepare_step
from quartet.services.orchestrator.algorithm.state import AlgorithmState
from quartet.services.orchestrator.context import RunContext
from quartet.services.orchestrator.rollout.collector import CollectedStep, Collector, FurtherRounds, ReplacementRule
from quartet.services.orchestrator.rollout.generation import PendingTrajectories
from quartet.services.orchestrator.rollout.sampling_rounds import SamplingRounds


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that is prepared and not committed.

    ``prompt_sets``: set of each prompt, by index; empty without sets. ``part_weights``: weight of each part of an ensemble, by
    name; empty for a single source.
    """

    step: int
    collected: CollectedStep
    prepared: PreparedStep
    rounds: SamplingRounds
    prompt_sets: Mapping[int, str] = field(default_factory=dict)
    part_weights: Mapping[str, float] = field(default_factory=dict)


class StepPreparation:
    """Preparation of steps: requests trajectories and scores, and computes the experience."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._config, self._board = run, run.config, run.board
        self._started: dict[int, tuple[GenerationBatch, PendingTrajectories]] = {}
        self.may_be_left = True
        """False for a step that a run must finish before it stops."""
        self._collector = Collector(
            run.stream,
            run.clients.scoring(),
            run.config.rollout.score_batch_size,
            run.profiler.observe,
            run.turns,
            *((run.config.rollout.max_off_policy_steps, self._has_command) if run.config.has_traffic else ()),
        )

    def _has_command(self) -> bool:
        return self.may_be_left and not self._run.control.idle

    def start_generation(self, step: int, prompts: Sequence[Prompt], leader_epoch: int, policy_version: int) -> None:
        """Start the generation of ``step`` before ``prepare``, while earlier steps end. Has no effect if it has started."""
        if step not in self._started:
            samples, greedy = self._config.rollout.generated_samples, self._config.num_greedy_baselines
            requests = requests_of(self._config.run.name, step, prompts, samples, greedy=greedy)
            self._started[step] = self._generate(step, prompts, requests, leader_epoch, policy_version)

    def discard(self) -> None:
        """Cancel the generations that have started early. Their trajectories are generated again."""
        # The training thread may add one meanwhile, if the process ends.
        for _, generation in list(self._started.values()):
            generation.cancel()
        self._started.clear()
        self._collector.reset()

    def policy_updated(self, leader_epoch: int, publication: PublishedWeights | None) -> None:
        """Pass on that the actor has published a policy version. See ``Generation.policy_updated``."""
        self._run.generation.policy_updated(leader_epoch, publication)

    def take_metrics(self, policy_version: int) -> dict[str, float]:
        """Return metrics of the generators, see ``Generation.take_metrics``."""
        return self._run.generation.take_metrics(policy_version)

    def prepare(
        self,
        step: int,
        rounds: SamplingRounds,
        leader_epoch: int,
        policy_version: int,
        algorithm_state: AlgorithmState,
    ) -> PendingStep:
        """Return the experience of ``step``, which begins with the first of its ``rounds``. Raises like ``Collector.collect``."""
        version = self._check_reference(step)
        config = with_values(self._run.live_settings.config_at(step), algorithm_state.coefficients)
        weights = config.reward.part_weights
        all_prompts = {prompt.index: prompt for prompt in rounds.prompts}
        with self._run.profiler.span(Role.ORCHESTRATOR, "collect", waits=True):
            collected = self._collect(
                step, all_prompts, leader_epoch, policy_version, weights, rounds, algorithm_state.prompts_skipped
            )
        with self._run.profiler.span(Role.ORCHESTRATOR, "prepare"):
            prepared = prepare_step(
                self._config.run.name,
                step,
                policy_version,
                collected.scored,
                config.algorithm,
                algorithm_state.moments([item.score for item in collected.scored], weights),
                self._config.rollout.max_response_tokens,
                collected.baselines,
            )
            if version is not None:
                prepared.metrics["reference_version"] = version
            sets = {prompt.index: prompt.prompt_set for prompt in all_prompts.values() if prompt.prompt_set}
            return PendingStep(step, collected, prepared, rounds, sets, weights)

    def _check_reference(self, step: int) -> int | None:
        """Return the version of the reference that scores ``step``. Raises FailedPrecondition if it is not the current one."""
        version, current = self._config.reference.version_of(step), self._run.clients.reference_version
        held = None if current is None else current.step
        if version != held:
            raise FailedPrecondition(
                f"step {step}: is scored by version {version} of the reference, not by version {held}"
            )
        return version

    def _collect(
        self,
        step: int,
        prompts: dict[int, Prompt],
        leader_epoch: int,
        policy_version: int,
        weights: Mapping[str, float],
        rounds: SamplingRounds,
        skipped_before: int,
    ) -> CollectedStep:
        """Collect a step. Adds the prompts of further rounds to ``prompts``, which are by index."""
        config, samples, greedy = (
            self._config,
            self._config.rollout.generated_samples,
            self._config.num_greedy_baselines,
        )
        self._board.update(phase="generate", num_scored=0, num_expected=len(prompts) * (samples + greedy))
        self.start_generation(step, [*prompts.values()], leader_epoch, policy_version)
        batch, generation = self._started.pop(step)
        fields = {prompt.index: prompt.fields for prompt in prompts.values()} if config.reward.needs_fields else {}

        def replacement(
            first_samples: Mapping[int, int], of_greedy: Collection[int]
        ) -> tuple[GenerationBatch, PendingTrajectories]:
            chosen = [prompts[index] for index in prompts if index in first_samples]
            requests = [
                replace(request, greedy=prompt.index in of_greedy)
                for prompt in chosen
                for request in requests_of(config.run.name, step, [prompt], 1, first_samples[prompt.index])
            ]
            # By now the policy has taken all updates before this step, whichever version generated the other samples.
            return self._generate(step, chosen, requests, leader_epoch, step - 1)

        def next_round(first_samples: Mapping[int, int]) -> tuple[GenerationBatch, PendingTrajectories]:
            for prompt in rounds.prompts:
                prompts[prompt.index] = prompt
                if config.reward.needs_fields:
                    fields[prompt.index] = prompt.fields
            self._board.update(num_expected=(rounds.num_kept + len(rounds.prompts)) * (samples + greedy))
            requests = [
                request
                for prompt in rounds.prompts
                for request in requests_of(
                    config.run.name, step, [prompt], samples, first_samples.get(prompt.index, 0), greedy
                )
            ]
            return self._generate(step, rounds.prompts, requests, leader_epoch, step - 1)

        return self._collector.collect(
            batch,
            generation,
            self._board.show_scored,
            fields,
            ReplacementRule(config.recovery, replacement),
            weights,
            FurtherRounds(rounds, next_round, skipped_before),
        )

    def _generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerationRequest],
        leader_epoch: int,
        policy_version: int,
    ) -> tuple[GenerationBatch, PendingTrajectories]:
        config = self._config
        return self._run.generation.start(
            GenerationBatch(
                config.run.name,
                step,
                leader_epoch,
                requests,
                run_sampling(config.rollout),
                config.run.seed,
                policy_version,
                episode=episode_settings(config.rollout, prompts),
            )
        )
