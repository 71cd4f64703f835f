"""Branches of an episode: the token sequences that its requests build, and the one that a request continues.

A request has the text before its answer. Each answer leaves points behind: texts that a later request may begin with, and the ids
that stand for them. The longest such text decides. At the end of its branch, the branch is extended; before it, a new branch
begins with the same ids. So ids that were generated are never tokenized again. A request that continues nothing begins a branch
with the ids of its whole text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.trajectory import Segment, SegmentRole
from quartet.contract.turn_record import RecordedTurn

Encode = Callable[[str, bool], IntArray]
"""Function that returns the ids of a text, int32 [tokens]. True: the text is the beginning of a sequence."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A text that later requests may begin with, and what stands for it in a branch.

    ``text``: everything up to and including an answer. ``dropped``: number of ids at the end of the answer that the text does not
    have, such as an end-of-sequence token. ``closing``: text that closes the answer, and is in ``text`` but not in the ids.
    """

    text: str
    dropped: int = 0
    closing: str = ""


@dataclass(frozen=True, slots=True)
class _Point:
    """An ending as it is kept: the length in bytes of its text and a digest of it, and the number of ids of its branch."""

    size: int
    digest: bytes
    branch: int
    tokens: int
    closing: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a request: the branch that it extends, or None for a new one, and the ids before its answer.

    ``prompt_ids``: all of them, int32 [tokens]. ``added``: those that no branch has yet, at the end of ``prompt_ids``.
    ``response_tokens``: those after the branch's own prompt.
    """

    branch: int | None
    prompt_ids: IntArray
    added: IntArray
    response_tokens: int


@dataclass(slots=True)
class Turn:
    """A generated answer in a branch. ``prompt_tokens``: number of ids before it.

    ``delivered``: the agent has it, as far as this process can tell.
    """

    record: RecordedTurn
    prompt_tokens: int
    delivered: bool = False

    @property
    def token_ids(self) -> IntArray:
        """The generated ids, int32 [tokens]."""
        return self.record.segment.token_ids


@dataclass(slots=True)
class OpenBranch:
    """A branch in progress: its prompt, then for each turn the ids before it, which may be none, and the turn."""

    prompt: IntArray
    turns: list[tuple[IntArray, Turn]] = field(default_factory=list)

    @property
    def token_ids(self) -> IntArray:
        """All ids, int32 [tokens]."""
        parts = [part for before, turn in self.turns for part in (before, turn.token_ids)]
        return np.concatenate([self.prompt, *parts])

    @property
    def tokens(self) -> int:
        """Number of ids."""
        return len(self.prompt) + sum(len(before) + len(turn.token_ids) for before, turn in self.turns)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of this branch in a trajectory."""
        result = [Segment(SegmentRole.PROMPT, self.prompt)]
        for before, turn in self.turns:
            if len(before):
                result.append(Segment(SegmentRole.OBSERVATION, before))
            result.append(turn.record.segment)
        return tuple(result)


class Branches:
    """The branches of one episode. Not thread-safe."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._branches: list[OpenBranch] = []
        self._points: list[_Point] = []

    def __len__(self) -> int:
        return len(self._branches)

    @property
    def generated_tokens(self) -> int:
        """Number of ids that the policy generated in all branches."""
        return sum(len(turn.token_ids) for branch in self._branches for _, turn in branch.turns)

    def place(self, text: str, is_chat: bool = False) -> Placement:
        """Return the place of a request by the text before its answer.

        ``is_chat``: it is a rendered chat. Its template has written what the tokenizer adds at the beginning of other texts.
        """
        data = text.encode(errors="surrogatepass")
        point = self._longest_point(data)
        if point is None:
            ids = self._encode(text, not is_chat)
            return Placement(None, ids, ids, 0)
        rest = point.closing + data[point.size :].decode(errors="surrogatepass")
        return self._continued(point.branch, point.tokens, self._encode(rest, False) if rest else _NO_IDS)

    def place_ids(self, token_ids: IntArray) -> Placement:
        """Return the place of a request by the ids before its answer, int32 [tokens]."""
        best: tuple[int, int] | None = None
        for number, branch in enumerate(self._branches):
            ids, end = branch.token_ids, len(branch.prompt)
            common = shared_length(ids, token_ids)
            for before, turn in branch.turns:
                end += len(before) + len(turn.token_ids)
                if end <= common and (best is None or end > best[1]):
                    best = number, end
        if best is None:
            return Placement(None, token_ids, token_ids, 0)
        return self._continued(*best, token_ids[best[1] :])

    def add(self, placement: Placement, turn: Turn, endings: Sequence[Ending]) -> None:
        """Add the answer to a request. ``endings``: what later requests may begin with."""
        number = placement.branch
        if number is None:
            number = len(self._branches)
            self._branches.append(OpenBranch(placement.prompt_ids, [(_NO_IDS, turn)]))
        else:
            self._branches[number].turns.append((placement.added, turn))
        tokens = self._branches[number].tokens
        for ending in endings:
            data = ending.text.encode(errors="surrogatepass")
            self._points.append(_Point(len(data), _digest(data), number, tokens - ending.dropped, ending.closing))

    def finished(self) -> list[tuple[OpenBranch, int, int]]:
        """Return the branches up to their last delivered turn, each with its parent and the number of ids that they share.

        They are in the order of these turns, so the last one ends the episode. The parent is the branch before it that begins
        with most of the same ids, -1 if none begins with the same id. An answer that the agent did not get is part of no branch
        that continues, because the agent cannot have sent it back.
        """
        kept = list[OpenBranch]()
        for branch in self._branches:
            last = max((number for number, (_, turn) in enumerate(branch.turns, 1) if turn.delivered), default=0)
            if last:
                kept.append(OpenBranch(branch.prompt, branch.turns[:last]))
        kept.sort(key=lambda branch: branch.turns[-1][1].record.index)
        result, earlier = list[tuple[OpenBranch, int, int]](), list[IntArray]()
        for branch in kept:
            shared = [shared_length(ids, branch.prompt) for ids in earlier]
            most = max(shared, default=0)
            result.append((branch, shared.index(most) if most else -1, most))
            earlier.append(branch.token_ids)
        return result

    def _continued(self, number: int, tokens: int, added: IntArray) -> Placement:
        branch = self._branches[number]
        ids = branch.token_ids
        if tokens == len(ids):
            # The next answer follows directly if nothing was added to the last one, as after one that was cut off.
            prompt = np.concatenate([ids, added])
            return Placement(number, prompt, added, len(prompt) - len(branch.prompt))
        prompt = np.concatenate([ids[:tokens], added])
        return Placement(None, prompt, added, 0)

    def _longest_point(self, data: bytes) -> _Point | None:
        """Return the point with the longest text that ``data`` begins with; of equal ones, one at the end of its branch."""
        best: _Point | None = None
        hashed, state = 0, hashlib.blake2b(digest_size=16)
        for point in sorted(self._points, key=lambda point: point.size):
            if point.size > len(data):
                break
            state.update(data[hashed : point.size])
            hashed = point.size
            if state.digest() == point.digest and (best is None or self._is_better(point, best)):
                best = point
        return best

    def _is_better(self, point: _Point, other: _Point) -> bool:
        return point.size > other.size or (self._is_end(point) and not self._is_end(other))

    def _is_end(self, point: _Point) -> bool:
        return point.tokens == self._branches[point.branch].tokens


_NO_IDS: IntArray = np.zeros(0, np.int32)


def shared_length(a: IntArray, b: IntArray) -> int:
    """Return the number of ids at the beginning of ``a`` that are those of ``b``."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
