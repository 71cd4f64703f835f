"""Trajectory ids, and checks of ragged batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quartet.contract.trajectory import Branch, FinishReason, Segment, SegmentRole, TokenBatch, Trajectory, TrajectoryId
from quartet.errors import InvalidRequest


def test_an_id_can_be_parsed_from_its_text() -> None:
    for identifier in (TrajectoryId("run", 1, 0, 0), TrajectoryId("a/b", 12, 345, 6)):
        assert TrajectoryId.parse(str(identifier)) == identifier


@pytest.mark.parametrize("text", ["", "run", "run/1/2", "/1/2/3", "run/1/2/x", "run/1/-2/3", "run/1/2/"])
def test_a_malformed_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected RUN/STEP/PROMPT/SAMPLE"):
        TrajectoryId.parse(text)


def test_ids_sort_by_number_and_not_by_text() -> None:
    ids = [TrajectoryId("r", 1, prompt, sample) for prompt in (2, 10) for sample in (2, 10)]
    assert sorted([ids[2], ids[0], ids[3], ids[1]]) == ids


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_batch_concatenates_prompt_and_response_of_each_trajectory() -> None:
    def trajectory(prompt: np.ndarray, response: np.ndarray) -> Trajectory:
        log_probs = np.zeros(len(response), np.float32)
        return Trajectory.of_response(TrajectoryId("r", 1, 0, 0), 0, prompt, response, log_probs, FinishReason.EOS)

    batch = TokenBatch.of([trajectory(ints(1, 2), ints(3)), trajectory(ints(4), ints(5, 6))])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert (batch.prompt_lengths.tolist(), batch.response_lengths.tolist()) == ([2, 1], [1, 2])
    assert [sequence.tolist() for sequence in batch.sequences()] == [[1, 2, 3], [4, 5, 6]]


def episode(*log_probs: float) -> Trajectory:
    """Return two turns with an observation between them. Log-probs are those of the turns, or none."""
    values = np.array(log_probs, np.float32)
    segments = (
        Segment(SegmentRole.PROMPT, ints(1, 2)),
        Segment(SegmentRole.POLICY, ints(3, 4), values[:2], 7),
        Segment(SegmentRole.OBSERVATION, ints(5, 6, 7)),
        Segment(SegmentRole.POLICY, ints(8), values[2:], 7),
    )
    return Trajectory(TrajectoryId("r", 1, 0, 0), 7, segments, FinishReason.DONE)


def test_the_response_of_an_episode_is_everything_after_the_prompt() -> None:
    item = episode(-1, -2, -3)
    assert item.prompt_ids.tolist() == [1, 2]
    assert item.response_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert item.response_mask.tolist() == [True, True, False, False, False, True]
    assert item.log_probs.tolist() == [-1, -2, 0, 0, 0, -3]
    assert (item.log_probs.dtype, item.response_ids.dtype, item.response_mask.dtype) == (np.float32, np.int32, np.bool_)
    assert item.policy_ids.tolist() == [3, 4, 8]
    batch = TokenBatch.of([item])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (batch.prompt_lengths.tolist(), batch.response_lengths.tolist()) == ([2], [6])


def test_log_probs_can_be_added_to_the_turns_of_an_episode() -> None:
    item = episode()
    assert (item.has_log_probs, len(item.log_probs)) == (False, 0)
    computed = item.with_log_probs(np.array([-1, -2, -9, -9, -9, -3], np.float32))
    assert computed.log_probs.tolist() == [-1, -2, 0, 0, 0, -3]
    assert [len(segment.log_probs) for segment in computed.segments] == [0, 2, 0, 1]


def forked(*log_probs: float) -> Trajectory:
    """Return the episode above with a second branch, which begins with its first turn. Log-probs are those of all turns."""
    values = np.array(log_probs, np.float32)
    branch = Branch(
        (
            Segment(SegmentRole.PROMPT, ints(1, 2, 3, 9)),
            Segment(SegmentRole.POLICY, ints(10, 11), values[3:5], 7),
            Segment(SegmentRole.OBSERVATION, ints(12)),
            Segment(SegmentRole.POLICY, ints(13), values[5:], 7),
        ),
        parent=0,
        shared_tokens=3,
    )
    return replace(episode(*log_probs[:3]), further_branches=(branch,))


def test_tokens_of_an_episode_run_over_all_branches() -> None:
    item = forked(-1, -2, -3, -4, -5, -6)
    assert item.prompt_ids.tolist() == [1, 2]
    assert item.response_ids.tolist() == [3, 4, 5, 6, 7, 8, 10, 11, 12, 13]
    assert item.response_mask.tolist() == [True, True, False, False, False, True, True, True, False, True]
    assert item.log_probs.tolist() == [-1, -2, 0, 0, 0, -3, -4, -5, 0, -6]
    assert item.policy_ids.tolist() == [3, 4, 8, 10, 11, 13]
    assert [turn.token_ids.tolist() for turn in item.turns] == [[3, 4], [8], [10, 11], [13]]
    assert item.branch_ids == ("r/1/0/0", "r/1/0/0#1")
    computed = forked().with_log_probs(np.arange(10, dtype=np.float32))
    assert computed.log_probs.tolist() == [0, 1, 0, 0, 0, 5, 6, 7, 0, 9]
    assert [len(part.log_probs) for part in computed.further_branches[0].segments] == [0, 2, 0, 1]
    assert (computed.further_branches[0].parent, computed.further_branches[0].shared_tokens) == (0, 3)


def test_a_batch_has_one_sequence_for_each_branch() -> None:
    batch = TokenBatch.of([forked(), episode()])
    assert [ids.tolist() for ids in batch.sequences()] == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 9, 10, 11, 12, 13],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert (batch.prompt_lengths.tolist(), batch.response_lengths.tolist()) == ([2, 4, 2], [6, 4, 6])
    last = TokenBatch.of_last_branches([forked(), episode()])
    assert [ids.tolist() for ids in last.sequences()] == [[1, 2, 3, 9, 10, 11, 12, 13], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert last.prompt_lengths.tolist() == [4, 2]


def test_one_turn_is_a_prompt_and_a_response_without_copies() -> None:
    response, log_probs = ints(3, 4), np.array([-1, -2], np.float32)
    item = Trajectory.of_response(TrajectoryId("r", 1, 0, 0), 7, ints(1), response, log_probs, FinishReason.EOS)
    assert item.response_ids is item.policy_ids is response
    assert item.log_probs is log_probs
    assert [segment.role for segment in item.segments] == [SegmentRole.PROMPT, SegmentRole.POLICY]


@pytest.mark.parametrize(
    ("token_ids", "prompts", "responses"),
    [
        (ints(), ints(), ints()),
        (ints(1, 2), ints(0), ints(2)),
        (ints(1, 2), ints(2), ints(0)),
        (ints(1, 2), ints(-1), ints(3)),
        (ints(1, 2), ints(1), ints(2)),
        (ints(1, 2, 3), ints(1), ints(1)),
        (ints(1, 2), ints(1), ints(1, 1)),
        (ints(1, 2), ints(2**31 - 1), ints(2**31 - 1)),
        (ints(1, 2).reshape(1, 2), ints(1), ints(1)),
    ],
)
def test_lengths_that_do_not_match_the_tokens_are_refused(
    token_ids: np.ndarray, prompts: np.ndarray, responses: np.ndarray
) -> None:
    with pytest.raises(InvalidRequest):
        TokenBatch(token_ids, prompts, responses)


@pytest.mark.parametrize(("token", "fits"), [(0, True), (9, True), (10, False), (-1, False)])
def test_token_ids_outside_the_vocabulary_are_refused(token: int, fits: bool) -> None:
    batch = TokenBatch(ints(1, token), ints(1), ints(1))
    if fits:
        batch.check_vocabulary(10)
        return
    with pytest.raises(InvalidRequest, match=rf"expected ids in 0\.\.9, got {token}"):
        batch.check_vocabulary(10)
