"""Prompts whose responses cannot be scored: the step skips them and takes the next ones, by rule and up to a limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.deployment import RecoveryConfig
from quartet.config.rollout import RolloutConfig
from quartet.contract.generation import GenerationBatch
from quartet.contract.trajectory import Outcome, Prompt, TrajectoryId
from quartet.data.prompt_order import PromptOrder, PromptSequence
from quartet.errors import ConfigError, QuartetError, ServiceFailed, TooManyFailedTrajectories
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_trajectories_note
from quartet.services.orchestrator.rollout.collector import (
    CollectedStep,
    Collector,
    FurtherRounds,
    ReplacementRule,
)
from quartet.services.orchestrator.rollout.prompt_failures import PromptFailures
from quartet.services.orchestrator.rollout.sampling_rounds import SamplingRounds
from quartet.services.orchestrator.rollout.scoring import ScoringServices
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from tests.services.orchestrator.fake_services import FakeGeneration
from tests.services.orchestrator.rollout.failing_services import (
    ALWAYS,
    FailingScorer,
    Name,
    batch_of,
    ended_generation,
    failed_trajectories,
    recovery_config,
    sampled,
    scored,
)
from tests.services.orchestrator.rollout.test_outcomes import OutcomeScorer

PROMPTS, STEP = 4, 1


class Step:
    """One step of 4 prompts, with a fake actor that records its requests."""

    def __init__(self, stream: RolloutStream, run: str, samples: int = 2, size: int = 40, **rollout: object) -> None:
        self._stream, self._run, self._samples = stream, run, samples
        prompts = [Prompt(index, np.ones(1, np.int32)) for index in range(size)]
        sequence = PromptSequence(PromptOrder(prompts, PROMPTS, 3), PROMPTS)
        self.order = [prompt.index for prompt in sequence.draw(0, min(size, 12)).prompts]
        config = RolloutConfig(prompts_per_step=PROMPTS, samples_per_prompt=samples, **rollout)  # type: ignore[arg-type]
        self.rounds = SamplingRounds(STEP, config, sequence, 0)
        self.requests: list[list[Name]] = []

    def all_samples(self, places: Collection[int], first: int = 0) -> dict[Name, tuple[Outcome, int]]:
        """Return a refusal for every sample of the prompts at these places of the order."""
        return {
            (self.order[place], sample): (Outcome.REFUSED, ALWAYS) for place in places for sample in range(first, 20)
        }

    def collect(
        self, scorer: FailingScorer, recovery: RecoveryConfig | None = None, skipped_before: int = 0, size: int = 2
    ) -> CollectedStep:
        collector = Collector(self._stream, ScoringServices(scorer, scorer, scorer, 0.7), size)  # type: ignore[arg-type]
        try:
            return collector.collect(
                *self._group({}),
                lambda _: None,
                None,
                ReplacementRule(recovery or recovery_config(), self._replacement),
                further=FurtherRounds(self.rounds, self._group, skipped_before),
            )
        finally:
            collector.reset()

    def _group(self, first_samples: Mapping[int, int]) -> tuple[GenerationBatch, FakeGeneration]:
        prompts = [prompt.index for prompt in self.rounds.prompts]
        return self._write(
            [(prompt, first_samples.get(prompt, 0) + sample) for prompt in prompts for sample in range(self._samples)]
        )

    def _replacement(
        self, first_samples: Mapping[int, int], greedy: Collection[int]
    ) -> tuple[GenerationBatch, FakeGeneration]:
        return self._write(sorted(first_samples.items()))

    def _write(self, requested: Sequence[Name]) -> tuple[GenerationBatch, FakeGeneration]:
        self.requests.append(list(requested))
        written = [sampled(self._run, *name) for name in requested]
        self._stream.append(written)
        return batch_of(written), ended_generation()


def kept(step: Step, places: Collection[int], samples: int = 2) -> list[Name]:
    return sorted((step.order[place], sample) for place in places for sample in range(samples))


def test_a_prompt_without_any_score_is_skipped_and_the_next_prompt_takes_its_place(
    stream: RolloutStream, run: str
) -> None:
    step = Step(stream, run, samples=3)
    collected = step.collect(OutcomeScorer(step.all_samples([1])))
    order = step.order
    assert step.requests[1:] == [[(order[4], sample) for sample in range(3)]], "expected one round with the next prompt"
    assert scored(collected) == kept(step, (0, 2, 3, 4), 3)
    assert collected.skipped_prompts == {order[1]}
    assert failed_trajectories(collected) == [((order[1], sample), 1) for sample in range(3)]
    assert step.rounds.metrics() == {"prompts_consumed": PROMPTS + 1}
    note = failed_trajectories_note(STEP, collected)
    assert f"replaced by responses to the next prompts (skipped, by line from 0: {order[1]});" in note
    stream.acknowledge(collected.entry_ids)
    assert stream.depth() == 0


@pytest.mark.parametrize("samples", [1, 2])
def test_a_small_group_gets_further_samples_before_its_prompt_is_skipped(
    samples: int, stream: RolloutStream, run: str
) -> None:
    step = Step(stream, run, samples)
    collected = step.collect(OutcomeScorer(step.all_samples([2])))
    order = step.order
    further = [[(order[2], sample)] for sample in range(samples, 3)]
    assert step.requests[1:] == [*further, [(order[4], sample) for sample in range(samples)]]
    assert scored(collected) == kept(step, (0, 1, 3, 4), samples)
    assert collected.skipped_prompts == {order[2]}


def test_a_prompt_with_a_score_is_not_skipped(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run)
    prompt = step.order[1]
    failing = step.all_samples([1])
    del failing[prompt, 1]
    del failing[prompt, 5]
    collected = step.collect(OutcomeScorer(failing))
    assert collected.skipped_prompts == frozenset()
    assert [name for name in scored(collected) if name[0] == prompt] == [(prompt, 1), (prompt, 5)]
    assert step.rounds.metrics() == {}, "the cursor has moved without a skipped prompt"


def test_a_replacement_that_cannot_be_scored_either_is_skipped(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3)
    collected = step.collect(OutcomeScorer(step.all_samples([0, 3, 4])))
    assert scored(collected) == kept(step, (1, 2, 5, 6), 3)
    assert collected.skipped_prompts == {step.order[place] for place in (0, 3, 4)}
    assert step.rounds.metrics() == {"prompts_consumed": 7}


def test_many_failures_of_one_prompt_count_as_one(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=8)
    collected = step.collect(OutcomeScorer(step.all_samples([1])), recovery_config(max_failed_trajectories=1))
    assert len(collected.failed_trajectories) == 8
    assert collected.skipped_prompts == {step.order[1]}


@pytest.mark.parametrize(
    "changes", [{"outcomes": {"refused": {"skip_prompt": False}}}, {"max_skipped_prompt_fraction": 0}]
)
def test_prompts_are_not_skipped_if_the_config_says_so(
    changes: dict[str, object], stream: RolloutStream, run: str
) -> None:
    step = Step(stream, run)
    with pytest.raises(TooManyFailedTrajectories, match="step 1: 5 of its trajectories could not be scored"):
        step.collect(OutcomeScorer(step.all_samples([1])), recovery_config(**changes))
    # An outcome has its other default still: refused responses are replaced at once.
    assert step.requests[1:] == [[(step.order[1], sample)] for sample in (2, 3, 4)]


@pytest.mark.parametrize(
    ("error", "raised"), [(TooManyFailedTrajectories, "prompts have no response with a score"), (ServiceFailed, "no")]
)
def test_a_scorer_that_fails_for_every_prompt_ends_the_step(
    error: type[QuartetError], raised: str, stream: RolloutStream, run: str
) -> None:
    step = Step(stream, run, samples=3)
    everything = {(prompt, sample) for prompt in range(40) for sample in range(9)}
    if error is ServiceFailed:
        scorer: FailingScorer = FailingScorer(ServiceFailed("no"), score=dict.fromkeys(everything, ALWAYS))
    else:
        scorer = OutcomeScorer(dict.fromkeys(everything, (Outcome.SCORER_ERROR, ALWAYS)))
    with pytest.raises(error, match=raised):
        step.collect(scorer)


def test_a_group_that_its_service_cannot_score_is_skipped(stream: RolloutStream, run: str) -> None:
    """A batch with the responses to one prompt only shows nothing about the others."""
    step = Step(stream, run, samples=3)
    prompt = step.order[1]
    scorer = FailingScorer(ServiceFailed("HTTP 500"), score={(prompt, sample): ALWAYS for sample in range(3)})
    collected = step.collect(scorer, size=3)
    assert collected.skipped_prompts == {prompt}
    assert scored(collected) == kept(step, (0, 2, 3, 4), 3)


def test_the_limit_names_outcomes_prompts_and_settings(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3)
    with pytest.raises(TooManyFailedTrajectories) as raised:
        step.collect(OutcomeScorer(step.all_samples([0, 2, 3])), recovery_config(max_failed_trajectories=2))
    first, text, lines = str(raised.value).split("\n")
    assert first == "source: refused"
    assert text.startswith("step 1: 3 of its prompts have no response with a score (failed responses: refused ")
    assert (
        "in a step of 4 prompts, at most 2 may be skipped, by recovery.max_skipped_prompt_fraction 0.1 and "
        "recovery.max_failed_trajectories 2" in text
    )
    assert sorted(lines.split(": ")[1].split(", ")) == sorted(str(step.order[place]) for place in (0, 2, 3))


@pytest.mark.parametrize(("skipped_before", "fails"), [(3, False), (4, True)])
def test_the_limit_holds_over_all_steps(skipped_before: int, fails: bool, stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3)
    scorer = OutcomeScorer(step.all_samples([1]))
    if not fails:
        assert step.collect(scorer, skipped_before=skipped_before).skipped_prompts == {step.order[1]}
        return
    with pytest.raises(
        TooManyFailedTrajectories,
        match="the steps before have skipped 4; of 4 prompts up to this step, at most 4 may be skipped",
    ):
        step.collect(scorer, skipped_before=skipped_before)


def test_dynamic_sampling_draws_for_skipped_prompts_as_for_equal_groups(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3, dynamic_sampling=True)
    collected = step.collect(OutcomeScorer(step.all_samples([1])))
    # Three of four prompts were kept, so two are expected to give the one that is missing.
    assert [name[0] for name in step.requests[1][::3]] == step.order[4:6]
    assert scored(collected) == kept(step, (0, 2, 3, 4), 3)
    assert step.rounds.metrics()["prompts_consumed"] == PROMPTS + 2
    assert step.rounds.metrics()["equal_groups"] == 0


def test_steps_that_are_generated_ahead_record_what_they_consume(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3, max_off_policy_steps=1)
    collected = step.collect(OutcomeScorer(step.all_samples([1])))
    assert scored(collected) == kept(step, (0, 2, 3, 4), 3)
    assert step.rounds.metrics() == {"prompts_consumed": PROMPTS + 1}


def test_data_without_another_prompt_is_an_error_that_names_the_skipped_ones(stream: RolloutStream, run: str) -> None:
    step = Step(stream, run, samples=3, size=PROMPTS)
    with pytest.raises(ConfigError, match=rf"rollout.prompts_per_step 4: .*lines from 0: {step.order[1]}\)"):
        step.collect(OutcomeScorer(step.all_samples([1])))


def test_a_prompt_whose_greedy_response_never_has_a_score_is_skipped(run: str) -> None:
    greedy = {TrajectoryId(run, STEP, 7, sample) for sample in (2, 3, 4)}
    failures = PromptFailures(recovery_config(), PROMPTS, greedy=greedy)
    failures.add_scored([TrajectoryId(run, STEP, prompt, sample) for prompt in (7, 8) for sample in (0, 1)])
    for sample in (2, 3, 4):
        assert failures.skip() == set()
        item = sampled(run, 7, sample)
        failures.add(FailedTrajectory(item, 1, "no", ServiceFailed, Outcome.REFUSED))
    assert failures.skip() == {7}
