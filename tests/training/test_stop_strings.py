"""Stop strings in whole runs: they end responses and turns, with the same bits wherever the responses are generated."""

from __future__ import annotations

from typing import Any

import pytest

from quartet.contract.trajectory import FinishReason
from quartet.demo.toy_task import ToyTask
from quartet.engines.stop_strings import StopStrings, token_decoder
from quartet.models.weights.tokenizer import load_tokenizer
from quartet.services.orchestrator.rollout.collector import CollectedStep
from tests.training.conftest import MakeConfig
from tests.training.generator_runs import run_with_generators
from tests.training.runs import assert_same, run_to_completion
from tests.training.test_episodes import EPISODES, environment

STRINGS = [*"aeiouylnrs", "th", "\ufb01"]
"""Many strings, because the policy of the tests writes nearly random bytes."""


@pytest.fixture
def check(toy_task: ToyTask) -> StopStrings:
    tokenizer = load_tokenizer(toy_task.policy)
    return StopStrings(STRINGS, token_decoder(tokenizer), len(tokenizer))


def test_responses_end_at_a_stop_string_and_do_not_count_as_truncated(
    make: MakeConfig, collected: list[CollectedStep], check: StopStrings
) -> None:
    sections: dict[str, Any] = {
        "rollout": {"stop_strings": STRINGS},
        "algorithm": {"num_epochs": 1, "truncation": {"treatment": "penalty", "penalty": 100.0}},
    }
    run = run_to_completion(make(**sections))
    ended, scores = 0, [line["score"] for step in (1, 2) for line in run.trajectories(step)]
    for item in [item for step in collected for item in step.scored]:
        ids = item.trajectory.response_ids
        end = check.end_of(ids)
        assert end in (None, len(ids))
        if end is not None:
            ended += 1
            assert item.trajectory.finish_reason is FinishReason.EOS
    assert ended > 2
    truncated = sum(1 - step["eos_rate"] for step in run.metrics) * len(scores) / 2
    penalties = sum(step["reward_mean"] - step["score_mean"] for step in run.metrics) * len(scores) / 2
    assert penalties == pytest.approx(100 * truncated, rel=1e-3, abs=1e-3)
    assert_same(run_with_generators(make(**sections), 2), run)


def test_a_stop_string_ends_a_turn_and_the_episode_continues(
    make: MakeConfig, collected: list[CollectedStep], check: StopStrings
) -> None:
    with environment():
        run_to_completion(make(**EPISODES | {"rollout": {**EPISODES["rollout"], "stop_strings": STRINGS}}))
    turns = [turn.token_ids for step in collected for item in step.scored for turn in item.trajectory.turns[:-1]]
    ends = [(check.end_of(turn), len(turn)) for turn in turns]
    assert all(end in (None, length) for end, length in ends)
    assert sum(end is not None for end, _ in ends) > 2
