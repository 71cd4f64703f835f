"""Rows of trajectories: the generator, its weights and their versions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from quartet.contract.trajectory import FinishReason, Outcome, Segment, SegmentRole, Trajectory, VersionSpan
from quartet.errors import ServiceFailed
from quartet.services.orchestrator.checkpointing.step_artifacts import failed_trajectory_rows, trajectory_rows
from quartet.services.orchestrator.rollout.collector import CollectedStep
from quartet.services.orchestrator.rollout.scoring_queue import FailedTrajectory
from tests.buffer.samples import forked, trajectory

OLD, NEW = bytes(range(16)), bytes(range(16, 32))


class Decoder:
    """A tokenizer that only decodes."""

    def batch_decode(self, sequences: list[Any], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(map(str, ids)) for ids in sequences]


def rows_of(item: Trajectory) -> list[dict[str, Any]]:
    """Return the rows of a trajectory that was scored, and of the same one that could not be scored."""
    scored: Any = SimpleNamespace(trajectory=item, score=1.0, parts={}, logged={})
    outcome = Outcome.SCORER_ERROR if item.outcome is Outcome.OK else item.outcome
    failed = FailedTrajectory(item, 3, "error", ServiceFailed, outcome)
    prepared: Any = SimpleNamespace(response_kl=np.zeros(1, np.float32))
    collected = CollectedStep([scored], [failed], [], 0.0, 0.0)
    return [*trajectory_rows(Decoder(), collected, prepared), *failed_trajectory_rows(Decoder(), [failed])]


def test_a_trajectory_names_its_generator_and_the_versions_of_its_weights() -> None:
    spans = (VersionSpan(4, OLD, 1), VersionSpan(5, NEW, 2))
    item = replace(trajectory("run", 0, version=5), weights_digest=NEW, generator="10.0.0.1:9000", version_spans=spans)
    for row in rows_of(item):
        assert (row["policy_version"], row["generator"], row["weights_digest"]) == (5, "10.0.0.1:9000", NEW.hex())
        assert row["version_spans"] == [
            {"policy_version": 4, "weights_digest": OLD.hex(), "tokens": 1},
            {"policy_version": 5, "weights_digest": NEW.hex(), "tokens": 2},
        ]


def test_a_trajectory_of_the_actor_has_only_a_policy_version() -> None:
    for row in rows_of(trajectory("run", 0, version=5)):
        assert row["policy_version"] == 5
        assert not {"generator", "weights_digest", "version_spans"} & row.keys()


def test_an_episode_has_its_segments_with_the_reward_of_each_turn() -> None:
    first = trajectory("run", 4)
    observation = Segment(SegmentRole.OBSERVATION, np.array([8, 9], np.int32))
    item = replace(first, segments=(*first.segments, observation, first.segments[1]), turn_rewards=(0.5, -1.0))
    scored_row, failed_row = rows_of(item)
    assert scored_row["segments"] == [
        {"role": "policy", "text": "4 5 6", "tokens": 3, "reward": 0.5},
        {"role": "observation", "text": "8 9", "tokens": 2},
        {"role": "policy", "text": "4 5 6", "tokens": 3, "reward": -1.0},
    ]
    assert (scored_row["response"], scored_row["response_tokens"]) == ("4 5 6 8 9 4 5 6", 6)
    assert "segments" not in failed_row


def test_a_failed_episode_has_its_outcome_and_what_is_needed_to_repeat_it() -> None:
    first = trajectory("run", 4)
    observation = Segment(SegmentRole.OBSERVATION, np.array([8, 9], np.int32))
    item = replace(
        first,
        segments=(*first.segments, observation),
        finish_reason=FinishReason.FAILED,
        outcome=Outcome.TIMEOUT,
    )
    row = rows_of(item)[-1]
    assert row["outcome"] == "timeout"
    assert row["response_ids"] == [4, 5, 6, 8, 9]
    assert row["segments"] == [{"role": "policy", "tokens": 3}, {"role": "observation", "tokens": 2}]


def test_an_episode_of_several_branches_has_each_of_them_once() -> None:
    scored_row, failed_row = rows_of(replace(forked("run", 4), turn_rewards=(0.5, -1.0)))
    assert (scored_row["prompt"], scored_row["response"], scored_row["response_tokens"]) == ("5 2", "4 5 6 54 60", 5)
    assert scored_row["segments"] == [{"role": "policy", "text": "4 5 6", "tokens": 3, "reward": 0.5}]
    assert scored_row["further_branches"] == [
        {
            "parent": 0,
            "shared_tokens": 2,
            "prompt_tokens": 3,
            "prompt": "70",
            "segments": [{"role": "policy", "text": "54 60", "tokens": 2, "reward": -1.0}],
        }
    ]
    assert failed_row["response_ids"] == [4, 5, 6, 54, 60]
    assert failed_row["segments"] == [{"role": "policy", "tokens": 3}]
    assert failed_row["further_branches"] == [
        {
            "parent": 0,
            "shared_tokens": 2,
            "prompt_ids": [5, 2, 70],
            "segments": [{"role": "policy", "tokens": 2}],
        }
    ]


def test_turns_without_an_environment_have_no_reward() -> None:
    row = rows_of(forked("run", 4))[0]
    assert row["segments"] == [{"role": "policy", "text": "4 5 6", "tokens": 3}]
    assert row["further_branches"][0]["segments"] == [{"role": "policy", "text": "54 60", "tokens": 2}]
