"""Branches: which one a request continues, and with which ids."""

from __future__ import annotations

import numpy as np
import pytest

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import FinishReason, Segment, SegmentRole
from quartet.contract.turn_record import RecordedTurn
from quartet.services.generator.sessions.branching import Branches, Ending, Placement, Turn, shared_length

END, FIRST = 9000, 9001


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def encode(text: str, first: bool) -> IntArray:
    """One id for each character; a sequence begins with another."""
    return np.array([FIRST] * first + ids(text), np.int32)


class Agent:
    """A conversation with branches, whose answers have the ids of their capital letters, and an end token."""

    def __init__(self) -> None:
        self.branches = Branches(encode)
        self.turns: list[Turn] = []

    def ask(self, text: str, answer: str, delivered: bool = True, place: Placement | None = None) -> Placement:
        """Request an answer. Later requests may begin with ``text``, ``answer`` and a line break, which closes it."""
        placement = place or self.branches.place(text)
        segment = Segment(SegmentRole.POLICY, np.array([*ids(answer.upper()), END], np.int32))
        record = RecordedTurn(len(self.turns), segment, 1, b"", FinishReason.EOS)
        turn = Turn(record, len(placement.prompt_ids), delivered)
        self.turns.append(turn)
        self.branches.add(placement, turn, [Ending(f"{text}{answer}\n", closing="\n")])
        return placement

    def segments(self) -> list[list[tuple[str, list[int]]]]:
        return [
            [(segment.role, segment.token_ids.tolist()) for segment in branch.segments]
            for branch, *_ in self.branches.finished()
        ]


def test_a_request_that_continues_the_conversation_keeps_the_generated_ids() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    placement = agent.ask("q>a\nr>", "b")
    assert placement.branch == 0
    assert placement.prompt_ids.tolist() == [FIRST, *ids("q>"), *ids("A"), END, *ids("\nr>")]
    assert placement.response_tokens == 5
    assert agent.segments() == [
        [
            ("prompt", [FIRST, *ids("q>")]),
            ("policy", [*ids("A"), END]),
            ("observation", ids("\nr>")),
            ("policy", [*ids("B"), END]),
        ]
    ]


def test_a_chat_gets_no_further_first_token_because_its_template_has_written_it() -> None:
    branches = Branches(encode)
    assert branches.place("q>", is_chat=True).prompt_ids.tolist() == ids("q>")
    assert branches.place("q>").prompt_ids.tolist() == [FIRST, *ids("q>")]


def test_an_edited_conversation_begins_a_branch_with_its_whole_text() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    placement = agent.ask("q>A, shorter\nr>", "b")
    assert placement.branch is None
    assert placement.prompt_ids.tolist() == [FIRST, *ids("q>A, shorter\nr>")]
    assert [(parent, shared) for _, parent, shared in agent.branches.finished()] == [(-1, 0), (0, 4)]


def test_a_request_that_continues_an_earlier_turn_forks_there_with_the_generated_ids() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    agent.ask("q>a\nr>", "b")
    placement = agent.ask("q>a\ns>", "c")
    assert placement.branch is None
    assert placement.prompt_ids.tolist() == [FIRST, *ids("q>"), *ids("A"), END, *ids("\ns>")]
    assert len(agent.branches) == 2
    # The shared ids include the line break after the turn.
    assert [(parent, shared) for _, parent, shared in agent.branches.finished()] == [(-1, 0), (0, 6)]


def test_each_branch_is_continued_by_its_own_text() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    agent.ask("p>", "b")
    assert agent.ask("q>a\nr>", "c").branch == 0
    assert agent.ask("p>b\nr>", "d").branch == 1
    assert agent.ask("q>a\nr>c\n", "e").branch == 0


def test_the_longest_text_decides_and_the_end_of_a_branch_before_the_middle_of_another() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    agent.ask("q>a\nr>", "b")
    # The same first request again, with the same answer: a second branch with the same text.
    agent.ask("q>", "a")
    assert len(agent.branches) == 2
    placement = agent.ask("q>a\ns>", "c")
    assert placement.branch == 1


def test_several_answers_to_a_prompt_are_branches_with_the_same_prompt() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    agent.ask("q>", "b")
    agent.ask("q>", "c")
    finished = agent.branches.finished()
    assert [branch.prompt.tolist() for branch, *_ in finished] == [[FIRST, *ids("q>")]] * 3
    assert [(parent, shared) for _, parent, shared in finished] == [(-1, 0), (0, 3), (0, 3)]


def test_an_answer_that_nobody_got_is_no_part_of_the_episode() -> None:
    agent = Agent()
    agent.ask("q>", "a")
    agent.ask("q>a\nr>", "b", delivered=False)
    agent.ask("z>", "c", delivered=False)
    assert agent.segments() == [[("prompt", [FIRST, *ids("q>")]), ("policy", [*ids("A"), END])]]


def test_an_episode_without_delivered_answers_has_no_branch() -> None:
    agent = Agent()
    assert agent.branches.finished() == []
    agent.ask("q>", "a", delivered=False)
    assert agent.branches.finished() == []


def test_an_ending_without_the_end_token_forks_before_it() -> None:
    branches = Branches(encode)
    placement = branches.place("q>")
    segment = Segment(SegmentRole.POLICY, np.array([*ids("a"), END], np.int32))
    turn = Turn(RecordedTurn(0, segment, 1, b"", FinishReason.EOS), 3, True)
    branches.add(placement, turn, [Ending("q>a", dropped=1)])
    continued = branches.place("q>a and more")
    assert (continued.branch, continued.prompt_ids.tolist()) == (None, [FIRST, *ids("q>a and more")])


def test_an_answer_without_endings_is_continued_by_no_request() -> None:
    branches = Branches(encode)
    turn = Turn(
        RecordedTurn(0, Segment(SegmentRole.POLICY, np.array([1], np.int32)), 1, b"", FinishReason.EOS), 3, True
    )
    branches.add(branches.place("q>"), turn, [])
    assert branches.place("q>a\n").branch is None


@pytest.mark.parametrize(
    ("given", "branch", "added"),
    [
        ([1, 2, 3, 8], 0, [8]),
        ([1, 2, 3], 0, []),
        ([1, 2], None, [1, 2]),
        ([1, 2, 4], None, [1, 2, 4]),
        ([5], None, [5]),
    ],
)
def test_token_ids_continue_the_branch_that_they_begin_with(
    given: list[int], branch: int | None, added: list[int]
) -> None:
    branches = Branches(encode)
    turn = Turn(
        RecordedTurn(0, Segment(SegmentRole.POLICY, np.array([3], np.int32)), 1, b"", FinishReason.LENGTH), 2, True
    )
    branches.add(branches.place_ids(np.array([1, 2], np.int32)), turn, [])
    placement = branches.place_ids(np.array(given, np.int32))
    assert (placement.branch, placement.prompt_ids.tolist(), placement.added.tolist()) == (branch, given, added)


def test_text_of_several_bytes_is_cut_between_characters() -> None:
    agent = Agent()
    agent.ask("größe? 🦊>", "ä")
    placement = agent.ask("größe? 🦊>ä\nö>", "b")
    assert placement.branch == 0
    assert placement.added.tolist() == ids("\nö>")


def test_shared_length() -> None:
    def shared(a: list[int], b: list[int]) -> int:
        return shared_length(np.array(a, np.int32), np.array(b, np.int32))

    assert [shared([], [1]), shared([1, 2], [1, 2, 3]), shared([1, 2, 3], [1, 5, 3]), shared([2], [1])] == [0, 2, 1, 0]
