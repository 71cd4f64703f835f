"""Rounds of dynamic sampling: which groups a step keeps, which prompts it takes next, and where it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import pytest

from quartet.buffer.rollout_stream import RolloutStream
from quartet.config.rollout import RolloutConfig
from quartet.contract.generation import GenerationBatch
from quartet.contract.trajectory import Prompt, Scores, TokenBatch
from quartet.data.prompt_order import PromptOrder, PromptSequence
from quartet.errors import ComputationFailed, TooManyEqualGroups
from quartet.services.orchestrator.rollout.collector import (
    CollectedStep,
    Collector,
    FurtherRounds,
    ReplacementRule,
)
from quartet.services.orchestrator.rollout.sampling_rounds import SamplingRounds
from quartet.services.orchestrator.rollout.scoring import ScoredTrajectory, ScoringServices
from tests.buffer.samples import trajectory
from tests.services.orchestrator.fake_services import FakeGeneration
from tests.services.orchestrator.rollout.failing_services import (
    ALWAYS,
    FailingScorer,
    Name,
    batch_of,
    ended_generation,
    failed_trajectories,
    names,
    recovery_config,
    sampled,
    scored,
)

PROMPTS, SAMPLES = 4, 2
NONE = np.zeros(0, np.float32)


def sequence(size: int = 40) -> PromptSequence:
    return PromptSequence(
        PromptOrder([Prompt(index, np.ones(1, np.int32)) for index in range(size)], PROMPTS, 3), PROMPTS
    )


def rounds_of(size: int = 40, consumed: int = 0, max_rounds: int = 10) -> SamplingRounds:
    rollout = RolloutConfig(
        prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, dynamic_sampling=True, max_sampling_rounds=max_rounds
    )
    return SamplingRounds(7, rollout, sequence(size), consumed)


def scores_of(prompts: Sequence[Prompt], equal: Sequence[int], score: float = 1.0) -> list[ScoredTrajectory]:
    """Return two scored responses to each prompt, with the same score for those whose place is in ``equal``."""
    return [
        ScoredTrajectory(
            trajectory("run", prompt.index, sample=sample),
            score if place in equal else sample / 4,
            NONE,
            NONE,
        )
        for place, prompt in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


def kept_prompts(items: Sequence[ScoredTrajectory]) -> list[int]:
    return [item.trajectory.id.prompt for item in items[::SAMPLES]]


def test_a_step_without_equal_groups_ends_after_one_round() -> None:
    rounds = rounds_of(consumed=8)
    assert rounds.prompts == sequence().draw(8, PROMPTS).prompts
    items = scores_of(rounds.prompts, equal=[])
    assert rounds.keep(items) == items
    assert not rounds.next_round()
    assert rounds.consumed == 12
    assert rounds.metrics() == {
        "sampling_rounds": 1,
        "equal_groups": 0,
        "prompts_consumed": 4,
        "generated_reward_mean": 0.125,
    }


def test_equal_groups_are_replaced_by_the_next_prompts() -> None:
    rounds, order = rounds_of(), sequence().draw(0, 12).prompts
    kept = rounds.keep(scores_of(rounds.prompts, equal=[1]))
    assert kept_prompts(kept) == [order[0].index, order[2].index, order[3].index]
    assert rounds.num_kept == 3
    assert rounds.next_round()
    # Three of four prompts were of use, so two prompts are expected to give the one that is missing.
    assert rounds.prompts == order[4:6]
    kept = rounds.keep([*kept, *scores_of(rounds.prompts, equal=[0])])
    assert kept_prompts(kept) == [order[index].index for index in (0, 2, 3, 5)]
    assert not rounds.next_round()
    assert rounds.consumed == 6
    assert rounds.metrics() == {
        "sampling_rounds": 2,
        "equal_groups": 2,
        "prompts_consumed": 6,
        "generated_reward_mean": (4 * 1.0 + 4 * 0.25) / 12,
    }


def test_groups_beyond_the_step_are_dropped_in_the_order_of_the_prompts_and_consumed() -> None:
    rounds, order = rounds_of(), sequence().draw(0, 12).prompts
    kept = rounds.keep(scores_of(rounds.prompts, equal=[0, 3]))
    assert rounds.next_round()
    assert rounds.prompts == order[4:8]
    # The order in which the scores arrive changes nothing.
    kept = rounds.keep([*kept, *reversed(scores_of(rounds.prompts, equal=[1]))])
    assert sorted(set(kept_prompts(kept))) == sorted(order[index].index for index in (1, 2, 4, 6))
    assert not rounds.next_round()
    assert rounds.metrics()["equal_groups"] == 3
    assert rounds.metrics()["prompts_consumed"] == rounds.consumed == 8


def test_a_round_takes_at_most_the_prompts_of_a_step() -> None:
    rounds = rounds_of()
    kept = rounds.keep(scores_of(rounds.prompts, equal=[0, 1, 2]))
    assert rounds.next_round()
    assert len(rounds.prompts) == PROMPTS
    rounds.keep([*kept, *scores_of(rounds.prompts, equal=[0, 1, 2, 3])])
    assert rounds.next_round()
    assert len(rounds.prompts) == PROMPTS


def test_the_limit_is_an_error_that_says_what_was_drawn() -> None:
    rounds = rounds_of(max_rounds=3)
    kept = rounds.keep(scores_of(rounds.prompts, equal=[0, 1, 2], score=0.5))
    for score in (0.0, 0.0):
        assert rounds.next_round()
        kept = rounds.keep([*kept, *scores_of(rounds.prompts, equal=range(4), score=score)])
    with pytest.raises(TooManyEqualGroups) as raised:
        rounds.next_round()
    assert str(raised.value).startswith(
        "step 7: after 3 rounds with 12 groups, 1 of 4 have scores that differ; in 11 groups all scores are equal, most often "
        "0 (8 groups); rollout.max_sampling_rounds is 3; "
    )


class GroupScorer(FailingScorer):
    """Scorer that scores all responses to some prompts alike, by the set of those prompts or by name."""

    def __init__(self, equal: Callable[[Name], bool], **failures: dict[Name, int]) -> None:
        super().__init__(ComputationFailed("no"), **failures)
        self._equal = equal

    def score(
        self, batch: TokenBatch, fields: Sequence[str] = (), weights: Mapping[str, float] | None = None
    ) -> object:
        numbers = [0.5 if self._equal(name) else name[1] / 8 for name in names(batch)]
        return self._call("score", batch, lambda: Scores(np.array(numbers, np.float32)))


class Groups:
    """Fake actor of a step with rounds."""

    def __init__(self, stream: RolloutStream, run: str, rounds: SamplingRounds) -> None:
        self._stream, self._run, self._rounds = stream, run, rounds
        self.requests: list[list[Name]] = []

    def write(self, requested: list[Name]) -> tuple[GenerationBatch, FakeGeneration]:
        self.requests.append(requested)
        written = [sampled(self._run, *name) for name in requested]
        self._stream.append(written)
        return batch_of(written), ended_generation()

    def group(self, first_samples: Mapping[int, int]) -> tuple[GenerationBatch, FakeGeneration]:
        return self.write(
            [
                (prompt.index, first_samples.get(prompt.index, 0) + sample)
                for prompt in self._rounds.prompts
                for sample in range(SAMPLES)
            ]
        )

    def replacement(
        self, first_samples: Mapping[int, int], greedy: Collection[int]
    ) -> tuple[GenerationBatch, FakeGeneration]:
        return self.write(sorted(first_samples.items()))


def collect(
    stream: RolloutStream, run: str, scorer: FailingScorer, rounds: SamplingRounds
) -> tuple[CollectedStep, Groups]:
    actor = Groups(stream, run, rounds)
    services = ScoringServices(scorer, scorer, scorer, 0.7)  # type: ignore[arg-type]
    collector = Collector(stream, services, 3)
    try:
        step = collector.collect(
            *actor.group({}),
            lambda _: None,
            None,
            ReplacementRule(recovery_config(), actor.replacement),
            further=FurtherRounds(rounds, actor.group),
        )
    finally:
        collector.reset()
    return step, actor


def test_a_collected_step_has_only_the_groups_that_it_keeps_and_acknowledges_all(
    stream: RolloutStream, run: str
) -> None:
    rounds, order = rounds_of(), [prompt.index for prompt in sequence().draw(0, 12).prompts]
    dull = {order[0], order[2], order[5]}
    step, actor = collect(stream, run, GroupScorer(lambda name: name[0] in dull), rounds)
    assert [[prompt for prompt, _ in names[::SAMPLES]] for names in actor.requests] == [order[:4], order[4:8]]
    kept = sorted((prompt, sample) for prompt in (order[1], order[3], order[4], order[6]) for sample in range(SAMPLES))
    assert scored(step) == kept
    assert len(step.entry_ids) == 8 * SAMPLES
    stream.acknowledge(step.entry_ids)
    assert stream.depth() == 0


def test_a_group_is_compared_after_its_failed_trajectories_are_replaced(stream: RolloutStream, run: str) -> None:
    rounds, order = rounds_of(), [prompt.index for prompt in sequence().draw(0, 12).prompts]
    # The first response of this prompt fails. Its other response and the replacement score alike.
    dull = order[1]
    scorer = GroupScorer(lambda name: name[0] == dull, score={(dull, 0): ALWAYS, (order[4], 1): ALWAYS})
    step, actor = collect(stream, run, scorer, rounds)
    later = [(prompt, sample) for prompt in order[4:6] for sample in range(SAMPLES)]
    assert actor.requests[1:] == [[(dull, 2)], later, [(order[4], 2)]]
    kept = [(prompt, sample) for prompt in (order[0], order[2], order[3]) for sample in range(SAMPLES)]
    assert scored(step) == sorted([*kept, (order[4], 0), (order[4], 2)])
    assert sorted(name for name, _ in failed_trajectories(step)) == sorted([(dull, 0), (order[4], 1)])


def test_a_prompt_that_is_drawn_again_gets_new_samples(stream: RolloutStream, run: str) -> None:
    rounds = rounds_of(size=PROMPTS)
    order = [prompt.index for prompt in sequence(PROMPTS).draw(0, PROMPTS).prompts]
    dull = order[0]
    # The data set has no further prompts, so the next pass gives the same prompt once more, with other responses.
    scorer = GroupScorer(lambda name: name[0] == dull and name[1] < 3, score={(dull, 1): ALWAYS})
    step, actor = collect(stream, run, scorer, rounds)
    assert actor.requests[1:] == [[(dull, 2)], [(dull, 3), (dull, 4)]]
    kept = [(prompt, sample) for prompt in order[1:] for sample in range(SAMPLES)]
    assert scored(step) == sorted([*kept, (dull, 3), (dull, 4)])
    assert rounds.metrics()["prompts_consumed"] > PROMPTS


def test_the_limit_ends_the_collection(stream: RolloutStream, run: str) -> None:
    with pytest.raises(TooManyEqualGroups, match="step 7: after 2 rounds with 8 groups, 0 of 4"):
        collect(stream, run, GroupScorer(lambda _: True), rounds_of(max_rounds=2))
